"""`coldpress optimize CATALOG`: run a campaign.

Exit codes and the JSON: see docs/reference/contract.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option

from freezer.cli import (
    NoiseOption,
    StoreOption,
    answer_signals,
    command_app,
    exiting,
    say,
    say_error,
)
from freezer.errors import (
    INFRASTRUCTURE,
    INTERRUPTED,
    CatalogError,
    InfrastructureError,
    UsageError,
)
from freezer.files import check_file
from freezer.spec import SamplingPolicy
from jobs.results import MlflowArtifactsOption, TrackingOption

if TYPE_CHECKING:
    from pipeline.config import Config

WAIT_S = 1800.0
"""How long `--wait-for-nodes` waits."""

LOG_WIDTH = 160
"""Width of lines in the log of a job."""

EXCLUSIONS = {
    "check": ("explain", "json", "metrics", "watch", "webhook"),
    "explain": ("json", "metrics", "watch", "webhook"),
}
"""Options without an effect beside another one."""

SAME = (
    *("catalog", "store", "address", "trust", "mlflow_artifacts"),
    *("keep_going", "lift_quarantine", "allow_regression"),
)
"""Options that are fields of the configuration as they are."""

app = command_app()

exits = partial(
    exiting,
    refused=INFRASTRUCTURE,
    interrupted="interrupted; finished work is kept, and the same command continues",
)


@app.command()
@exits()
def main(
    context: typer.Context,
    catalog: Annotated[
        str,
        Argument(
            help="A catalog: .yaml, .json or .jsonl; or `mlflow:` or `mlflow:@ALIAS` for a whole"
            " registry."
        ),
    ],
    store: StoreOption = "./store",
    tracking_uri: TrackingOption = None,
    address: Annotated[
        str | None,
        Option(help="Address of a Ray cluster. Default: RAY_ADDRESS, or a local Ray."),
    ] = None,
    campaign: Annotated[
        str | None,
        Option(
            help="Name; the same name continues the same campaign. Default: the catalog's name."
        ),
    ] = None,
    device_class: Annotated[
        list[str] | None,
        Option(help="Freeze for this class instead of the entries' classes. Repeatable."),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        Option(help="Use this recipe instead of the entries' recipes. Repeatable."),
    ] = None,
    only: Annotated[
        list[str] | None, Option(help="Only entries whose names match this glob. Repeatable.")
    ] = None,
    filter_: Annotated[
        str | None,
        Option(
            "--filter",
            help="With `mlflow:`, a filter: \"name LIKE 'credit-%' AND tags.team = 'risk'\".",
        ),
    ] = None,
    trust: Annotated[
        bool,
        Option("--trust", help="With `mlflow:`, load pickled models, which executes their code."),
    ] = False,
    explain: Annotated[
        bool, Option("--explain", help="Print what would be done and why, and exit.")
    ] = False,
    check: Annotated[
        bool, Option("--check", help="Only check the entries of the catalog, and exit.")
    ] = False,
    keep_going: Annotated[
        bool, Option("--keep-going", help="Run the valid entries if others are invalid.")
    ] = False,
    wait_for_nodes: Annotated[
        bool,
        Option(
            "--wait-for-nodes",
            help="Wait for nodes of classes without nodes, at most"
            f" {WAIT_S:g} s, and request them from an autoscaler.",
        ),
    ] = False,
    lift_quarantine: Annotated[
        bool,
        Option("--lift-quarantine", help="Retry what crashed or hung in earlier campaigns."),
    ] = False,
    accept_noise: NoiseOption = False,
    allow_regression: Annotated[
        bool,
        Option(
            "--allow-regression",
            help="Publish what is slower, or drifts more, than the artifact that serves now.",
        ),
    ] = False,
    mlflow_artifacts: MlflowArtifactsOption = "copy",
    json: Annotated[Path | None, Option(help="Write the outcomes to this file.")] = None,
    metrics: Annotated[
        str | None,
        Option(
            help="Serve Prometheus metrics at HOST:PORT while the campaign runs: 127.0.0.1:9105."
        ),
    ] = None,
    watch: Annotated[
        float | None,
        Option(
            help="With `mlflow:`, repeat every so many seconds, for new versions.",
            min=1,
        ),
    ] = None,
    webhook: Annotated[
        str | None,
        Option(
            help="With --watch, listen at HOST:PORT for webhooks of MLflow's registry, and repeat"
            " at once."
        ),
    ] = None,
    verbose: Annotated[
        bool, Option("--verbose", help="Print a line for each recipe and step.")
    ] = False,
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
        drive = partial(_watch, once, watch, webhook)
    sys.exit(in_child(exits()(drive)) if joined_address(address) else drive())


def _watch(once: Callable[[], int], interval_s: float, webhook: str | None) -> int:
    """Run a campaign again and again until it is interrupted; what is unchanged is skipped.

    Args:
        once: runs the campaign.
        interval_s: seconds from one run to the next.
        webhook: address where MLflow may ask for the next run at once.
    """
    from pipeline.tracking import registry_events

    with registry_events(webhook) as event:
        while True:
            event.clear()
            try:
                exit_code = once()
            except (CatalogError, InfrastructureError) as error:
                say_error(error)  # the registry has no models, or is down
            else:
                if exit_code == INTERRUPTED:
                    return exit_code
            event.wait(interval_s)


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
        **{name: options[name] for name in SAME},
        tracking_uri=options["tracking_uri"] or default_tracking_uri(),
        campaign=options["campaign"] or "",
        device_classes=tuple(options["device_class"] or ()),
        recipes=tuple(options["recipe"] or ()),
        only=tuple(options["only"] or ()),
        filter_string=options["filter_"],
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
    if options["webhook"] and not options["watch"]:
        raise UsageError("--webhook only applies to --watch; give the seconds of its fallback")


def check_locations(config: Config, json: Path | None) -> None:
    """Reject relative locations of a job's output."""
    from pipeline.cluster import check_absolute

    locations = {"--store": config.store, "--tracking-uri": config.tracking_uri}
    if json is not None:
        locations["--json"] = str(json)
    check_absolute(locations)


if __name__ == "__main__":
    app()
