"""`coldpress optimize CATALOG`: run a campaign.

Exit codes and the JSON: see docs/reference/contract.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from freezer.cli import NoiseOption, StoreOption, answer_signals, exiting, say, say_error
from freezer.errors import (
    INFRASTRUCTURE,
    INTERRUPTED,
    CatalogError,
    InfrastructureError,
    UsageError,
)
from freezer.files import check_file
from freezer.spec import SamplingPolicy
from jobs.replay import MlflowArtifactsOption, TrackingOption

if TYPE_CHECKING:
    from pipeline.config import Config

WAIT_S = 1800.0
"""How long `--wait-for-nodes` waits."""

LOG_WIDTH = 160
"""Width of lines in the log of a job."""

EXCLUSIONS = {
    "check": ("explain", "json", "metrics", "watch"),
    "explain": ("json", "metrics", "watch"),
}
"""Options without an effect beside another one."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

CatalogArgument = Annotated[
    str,
    typer.Argument(
        help="A catalog: .yaml, .json or .jsonl; or `mlflow:` or `mlflow:@ALIAS` for a whole"
        " registry."
    ),
]
AddressOption = Annotated[
    str | None, typer.Option(help="Address of a Ray cluster. Default: RAY_ADDRESS, or a local Ray.")
]
CampaignOption = Annotated[
    str | None,
    typer.Option(
        help="Name; the same name continues the same campaign. Default: the catalog's name."
    ),
]
ClassesOption = Annotated[
    list[str] | None,
    typer.Option(help="Freeze for this class instead of the entries' classes. Repeatable."),
]
RecipesOption = Annotated[
    list[str] | None,
    typer.Option(help="Use this recipe instead of the entries' recipes. Repeatable."),
]
OnlyOption = Annotated[
    list[str] | None, typer.Option(help="Only entries whose names match this glob. Repeatable.")
]
FilterOption = Annotated[
    str | None,
    typer.Option(
        "--filter",
        help="With `mlflow:`, a filter: \"name LIKE 'credit-%' AND tags.team = 'risk'\".",
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option("--trust", help="With `mlflow:`, load pickled models, which executes their code."),
]
ExplainOption = Annotated[
    bool, typer.Option("--explain", help="Print what would be done and why, and exit.")
]
CheckOption = Annotated[
    bool, typer.Option("--check", help="Only check the entries of the catalog, and exit.")
]
KeepGoingOption = Annotated[
    bool, typer.Option("--keep-going", help="Run the valid entries if others are invalid.")
]
WaitOption = Annotated[
    bool,
    typer.Option(
        "--wait-for-nodes",
        help="Wait for nodes of classes without nodes, at most"
        f" {WAIT_S:g} s, and request them from an autoscaler.",
    ),
]
LiftOption = Annotated[
    bool,
    typer.Option("--lift-quarantine", help="Retry what crashed or hung in earlier campaigns."),
]
RegressionOption = Annotated[
    bool,
    typer.Option(
        "--allow-regression",
        help="Publish what is slower, or drifts more, than the artifact that serves now.",
    ),
]
WatchOption = Annotated[
    float | None,
    typer.Option(
        help="With `mlflow:`, repeat every so many seconds, for new versions.",
        min=1,
    ),
]
JsonFileOption = Annotated[Path | None, typer.Option(help="Write the outcomes to this file.")]
MetricsOption = Annotated[
    str | None,
    typer.Option(
        help="Serve Prometheus metrics at HOST:PORT while the campaign runs: 127.0.0.1:9105."
    ),
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", help="Print a line for each recipe and step.")
]


exits = partial(
    exiting,
    refused=INFRASTRUCTURE,
    interrupted="interrupted; finished work is kept, and the same command continues",
)


@app.command()
@exits()
def main(
    context: typer.Context,
    catalog: CatalogArgument,
    store: StoreOption = "./store",
    tracking_uri: TrackingOption = None,
    address: AddressOption = None,
    campaign: CampaignOption = None,
    device_class: ClassesOption = None,
    recipe: RecipesOption = None,
    only: OnlyOption = None,
    filter_: FilterOption = None,
    trust: TrustOption = False,
    explain: ExplainOption = False,
    check: CheckOption = False,
    keep_going: KeepGoingOption = False,
    wait_for_nodes: WaitOption = False,
    lift_quarantine: LiftOption = False,
    accept_noise: NoiseOption = False,
    allow_regression: RegressionOption = False,
    mlflow_artifacts: MlflowArtifactsOption = "copy",
    json: JsonFileOption = None,
    metrics: MetricsOption = None,
    watch: WatchOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Freeze, judge and publish every model of a catalog."""
    from pipeline.cluster import check_address, in_child, joined_address
    from pipeline.reporting import LineDisplay
    from pipeline.run import check as check_
    from pipeline.run import explain as explain_

    config = checked_config(context.params)
    check_address(address)
    if json is not None:
        check_file(json, "--json")
    answer_signals("the same command continues")
    if check:
        say(f"{catalog.rstrip(':')}: entries: {check_(config, say)}, errors: 0")
        return
    once = partial(_run, config, json=json, metrics=metrics, verbose=verbose)
    drive: Callable[[], int | None] = once
    if explain:
        drive = partial(explain_, config, LineDisplay(_console()))
    elif watch is not None:
        drive = partial(_watch, once, watch)
    sys.exit(in_child(exits()(drive)) if joined_address(address) else drive())


def _watch(once: Callable[[], int], interval_s: float) -> int:
    """Run a campaign again and again until it is interrupted; what is unchanged is skipped."""
    while True:
        try:
            exit_code = once()
        except (CatalogError, InfrastructureError) as error:  # a registry without models, or down
            say_error(error)
        else:
            if exit_code == INTERRUPTED:
                return exit_code
        time.sleep(interval_s)


def _run(
    config: Config,
    *,
    json: Path | None,
    metrics: str | None,
    verbose: bool,
) -> int:
    """Run a campaign; return the exit code. See the options of `main`."""
    from pipeline.reporting import display_for, metered, print_report
    from pipeline.run import run

    console = _console()
    with metered(display_for(console, verbose=verbose), config.campaign, metrics) as display:
        report = run(config, display)
    print_report(report, console, config.store, config.tracking_uri)
    if json is not None:
        report.write_json(json)
    return report.exit_code


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else LOG_WIDTH)


def checked_config(options: Mapping[str, Any]) -> Config:
    """Return the campaign that options describe.

    Args:
        options: parsed options, by the names of the parameters of `main`.

    Raises:
        UsageError: a value is invalid, or an option would have no effect.
    """
    from pipeline.cluster import in_job
    from pipeline.config import Config
    from pipeline.tracking import default_tracking_uri

    config = Config(
        catalog=options["catalog"],
        store=options["store"],
        tracking_uri=options["tracking_uri"] or default_tracking_uri(),
        campaign=options["campaign"] or "",
        address=options["address"],
        device_classes=tuple(options["device_class"] or ()),
        recipes=tuple(options["recipe"] or ()),
        only=tuple(options["only"] or ()),
        filter_string=options["filter_"],
        trust=options["trust"],
        keep_going=options["keep_going"],
        lift_quarantine=options["lift_quarantine"],
        allow_regression=options["allow_regression"],
        mlflow_artifacts=options["mlflow_artifacts"],
        policy=SamplingPolicy(accept_noise=options["accept_noise"]),
        wait_s=WAIT_S if options["wait_for_nodes"] else None,
    )
    config.check()
    check_exclusions(options)
    if in_job():
        check_locations(config, options["json"])
    return config


def check_exclusions(options: Mapping[str, Any]) -> None:
    """Reject options that exclude each other, or would have no effect."""
    from pipeline.catalog import is_registry

    for name, others in EXCLUSIONS.items():
        for other in others:
            if options[name] and options[other]:
                raise UsageError(
                    f"--{name} and --{other} exclude each other; leave one of them out"
                )
    if options["watch"] and not is_registry(options["catalog"]):
        raise UsageError("--watch only applies to `mlflow:` catalogs")


def check_locations(config: Config, json: Path | None) -> None:
    """Reject relative locations of a job's output."""
    from pipeline.cluster import check_absolute

    locations = {"--store": config.store, "--tracking-uri": config.tracking_uri}
    if json is not None:
        locations["--json"] = str(json)
    check_absolute(locations)


if __name__ == "__main__":
    app()
