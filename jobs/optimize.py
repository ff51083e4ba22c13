"""`python -m jobs.optimize CATALOG`: run a campaign.

Exit codes and the JSON: see docs/run-a-fleet.md.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from freezer.errors import UsageError
from freezer.files import check_file
from freezer.freezing.recipes import select
from freezer.hardware import device_class as known_class
from freezer.spec import SamplingPolicy
from freezer.store import NAME
from jobs.exits import exiting, say
from pipeline.catalog import BadEntriesError, is_registry, refuse_bad_entries
from pipeline.cluster import check_absolute, in_job
from pipeline.config import Config
from pipeline.ledger import check_campaign
from pipeline.reporting import (
    CampaignReport,
    LineDisplay,
    display_for,
    metered,
    print_next_steps,
    print_report,
)
from pipeline.run import explain as explain_
from pipeline.run import read, run
from pipeline.scheduling import WAIT_S
from pipeline.watch import watch as watch_

LOG_WIDTH = 160

EXCLUSIONS = {
    "check": ("explain", "json", "metrics", "watch"),
    "explain": ("json", "metrics", "quiet", "watch"),
    "quiet": ("verbose",),
}
"""Options without an effect beside another one."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    context: typer.Context,
    catalog: Annotated[
        str,
        typer.Argument(
            help=(
                "A catalog: .yaml, .jsonl or .parquet; or `mlflow:` or `mlflow:@ALIAS` for a whole"
                " registry."
            )
        ),
    ],
    store: Annotated[
        str, typer.Option(help="Store to publish to: a folder, s3:// or gs://.")
    ] = "./store",
    tracking_uri: Annotated[str, typer.Option(help="URI of MLflow.")] = "sqlite:///mlflow.db",
    address: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster. Default: a local Ray.")
    ] = None,
    campaign: Annotated[
        str | None,
        typer.Option(
            help="Name; the same name continues the same campaign. Default: the catalog's name."
        ),
    ] = None,
    device_class: Annotated[
        list[str] | None,
        typer.Option(help="Freeze for this class instead of the entries' classes. Repeatable."),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(help="Use this recipe instead of the entries' recipes. Repeatable."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only entries whose names match this glob. Repeatable.")
    ] = None,
    filter_: Annotated[
        str | None,
        typer.Option(
            "--filter",
            help="With `mlflow:`, a filter: \"name LIKE 'credit-%' AND tags.team = 'risk'\".",
        ),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="With `mlflow:`, load pickled models, which executes their code."
        ),
    ] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", "--dry-run", help="Print what would be done and why, and exit."),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only check the entries of the catalog, and exit.")
    ] = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Run the valid entries if others are invalid.")
    ] = False,
    wait_for_nodes: Annotated[
        bool,
        typer.Option(
            "--wait-for-nodes",
            help="Wait for nodes of classes without nodes, and request them from an autoscaler.",
        ),
    ] = False,
    wait_limit: Annotated[
        float | None,
        typer.Option(
            help=f"Time limit of --wait-for-nodes, in seconds. Default: {WAIT_S:g}.", min=0
        ),
    ] = None,
    lift_quarantine: Annotated[
        bool,
        typer.Option(
            "--lift-quarantine", help="Retry unchanged models that crashed in earlier campaigns."
        ),
    ] = False,
    accept_noise: Annotated[
        bool,
        typer.Option(
            "--accept-noise",
            help="On busy machines, publish what is faster even by disturbed measurements.",
        ),
    ] = False,
    allow_regression: Annotated[
        bool,
        typer.Option(
            "--allow-regression",
            help="Publish what is slower, or drifts more, than the artifact that serves now.",
        ),
    ] = False,
    mlflow_artifacts: Annotated[
        Literal["copy", "reference"],
        typer.Option(help="Whether MLflow stores whole artifacts, or references to the store."),
    ] = "copy",
    json: Annotated[Path | None, typer.Option(help="Write the outcomes to this file.")] = None,
    watch: Annotated[
        float | None,
        typer.Option(
            help=(
                "With `mlflow:`, go on: look for new versions every so many seconds, and freeze"
                " them."
            ),
            min=1,
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Serve Prometheus metrics at HOST:PORT while the campaign runs: 127.0.0.1:9105."
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print only the final table and errors.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print a line for each recipe and step.")
    ] = False,
) -> None:
    """Freeze, judge and publish every model of a catalog."""
    console, errors = Console(), Console(stderr=True)
    if not console.is_terminal:
        console = Console(width=LOG_WIDTH)  # a job's log has no width
    signal.signal(signal.SIGTERM, interrupt)
    with exiting(
        errors, interrupted="interrupted; finished work is kept, and the same command continues"
    ):
        name = campaign or campaign_name(catalog)
        check_campaign(name)
        if in_job():
            check_absolute(locations(store, tracking_uri, json))
        check_options(context.params)
        if json is not None:
            check_file(json, "--json")
        config = Config(
            catalog=catalog,
            store=store,
            tracking_uri=tracking_uri,
            campaign=name,
            address=address,
            device_classes=tuple(device_class or ()),
            recipes=tuple(recipe or ()),
            only=tuple(only or ()),
            filter_string=filter_,
            trust=trust,
            keep_going=keep_going,
            lift_quarantine=lift_quarantine,
            allow_regression=allow_regression,
            mlflow_artifacts=mlflow_artifacts,
            policy=SamplingPolicy(accept_noise=accept_noise),
            wait_s=(WAIT_S if wait_limit is None else wait_limit) if wait_for_nodes else None,
        )
        display = display_for(console, quiet=quiet, verbose=verbose)

        def passed(report: CampaignReport, models: Collection[str]) -> None:
            shown = replace(
                report,
                outcomes=tuple(outcome for outcome in report.outcomes if outcome.model in models),
            )
            if shown.outcomes or shown.infrastructure:
                print_report(shown, console, store)
            if json is not None:
                report.write_json(json)

        try:
            if check:
                catalog_ = read(config)
                refuse_bad_entries(catalog_.problems, keep_going=False)
                num_entries = len(catalog_.entries)
                say(
                    console,
                    f"{catalog}: {num_entries} {'entry' if num_entries == 1 else 'entries'}, no"
                    " errors",
                    "",
                )
                return
            if explain:
                explain_(config, LineDisplay(console))
                return
            if watch is not None:
                with metered(display, name, metrics) as counted:
                    report = watch_(config, counted, watch, passed)
            else:
                with metered(display, name, metrics) as counted:
                    report = run(config, counted)
                passed(report, {outcome.model for outcome in report.outcomes})
                if not quiet:
                    print_next_steps(report, console, store=store, tracking_uri=tracking_uri)
        except BadEntriesError as error:
            for problem in error.problems:
                say(errors, problem.coded)
            raise
    sys.exit(report.exit_code)


def check_options(options: Mapping[str, Any]) -> None:
    """Reject unknown recipes and device classes, and options that would have no effect.

    Args:
        options: parsed, by the names of the parameters of `main`.

    Raises:
        UsageError: an option is rejected.
    """
    select(options["recipe"] or (), portable=False)
    for name in options["device_class"] or ():
        if name != "auto":
            known_class(name)
    if not is_registry(options["catalog"]):
        if options["filter_"] is not None:
            raise UsageError(
                "--filter only applies to `mlflow:` catalogs; use --only GLOB for a file"
            )
        if options["watch"] is not None:
            raise UsageError(
                "--watch only applies to `mlflow:` catalogs; run the command again after a catalog"
                " file has changed"
            )
        if options["trust"]:
            raise UsageError(
                "--trust only applies to `mlflow:` catalogs; in a file, write `trust: true` in the"
                " entries that need it"
            )
    for name, others in EXCLUSIONS.items():
        for other in others:
            if options[name] and options[other]:
                raise UsageError(
                    f"--{name} and --{other} exclude each other; leave one of them out"
                )
    if options["wait_limit"] is not None and not options["wait_for_nodes"]:
        raise UsageError(
            "--wait-limit only applies with --wait-for-nodes; add that, or leave it out"
        )


def locations(store: str, tracking_uri: str, json: Path | None) -> dict[str, str]:
    """Return the locations of a job's output, by option."""
    return {
        "--store": store,
        "--tracking-uri": tracking_uri,
        **({} if json is None else {"--json": str(json)}),
    }


def campaign_name(catalog: str) -> str:
    """Return the catalog's name, or the time if that is not a valid name."""
    if is_registry(catalog):
        return "-".join(("mlflow", *catalog.removeprefix("mlflow:").strip("@/").lower().split()))
    stem = Path(catalog).stem.lower()
    return stem if NAME.fullmatch(stem) else datetime.now(UTC).strftime("%Y%m%d-%H%M%S")


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM like Ctrl-C."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    app()
