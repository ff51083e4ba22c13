"""`python -m jobs.optimize CATALOG`: run a campaign. Exit codes and the JSON: see docs/run-a-fleet.md."""

from __future__ import annotations

import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer
from rich.console import Console

from freezer.errors import UsageError
from freezer.files.paths import check_file
from freezer.freezing.recipes.recipes import select
from freezer.store.store import NAME
from jobs.exits import exiting, say
from pipeline.catalog.catalog import BadEntriesError, is_registry
from pipeline.cluster.locations import check_absolute, in_job
from pipeline.config import Config
from pipeline.ledger.lease import check_campaign
from pipeline.reporting.campaign_report import print_next_steps, print_report
from pipeline.reporting.display import display_for
from pipeline.run import run
from pipeline.scheduling.fleet import WAIT_S

LOG_WIDTH = 160

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    catalog: Annotated[
        str, typer.Argument(help="A catalog: .yaml, .jsonl or .parquet; or `mlflow:` or `mlflow:@ALIAS` for a whole registry.")
    ],
    store: Annotated[str, typer.Option(help="Where artifacts are published: a folder, s3:// or gs://.")] = "./store",
    tracking_uri: Annotated[str, typer.Option(help="Of MLflow.")] = "sqlite:///mlflow.db",
    address: Annotated[str | None, typer.Option(help="Of a Ray cluster. Default: a local Ray for this run.")] = None,
    campaign: Annotated[
        str | None, typer.Option(help="A name; the same name goes on with the same campaign. Default: the catalog's.")
    ] = None,
    device_class: Annotated[
        list[str] | None, typer.Option(help="Freeze for this class, whatever the entries say. Repeatable.")
    ] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="Use this recipe, whatever the entries say. Repeatable.")] = None,
    only: Annotated[str | None, typer.Option(help="A glob: only entries whose names match.")] = None,
    filter_: Annotated[
        str | None, typer.Option("--filter", help="With `mlflow:`, which models: \"name LIKE 'credit-%' AND tags.team = 'risk'\".")
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help="With `mlflow:`, load pickled models, which run code.")] = False,
    explain: Annotated[bool, typer.Option("--explain", "--dry-run", help="Say what would be done and why, and stop.")] = False,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Run the good entries when others are bad.")] = False,
    wait_for_nodes: Annotated[
        bool, typer.Option("--wait-for-nodes", help="Wait for nodes of classes that have none: an autoscaler is asked for them.")
    ] = False,
    wait_limit: Annotated[float, typer.Option(help="With --wait-for-nodes, how long, in seconds.", min=0)] = WAIT_S,
    lift_quarantine: Annotated[
        bool, typer.Option("--lift-quarantine", help="Try again what crashed in earlier campaigns and has not changed since.")
    ] = False,
    mlflow_artifacts: Annotated[
        Literal["copy", "reference"], typer.Option(help="Whether MLflow holds whole artifacts, or references to the store.")
    ] = "copy",
    json: Annotated[Path | None, typer.Option(help="Write the outcomes to this file.")] = None,
) -> None:
    """Freeze, judge and publish every model of a catalog."""
    console, errors = Console(), Console(stderr=True)
    if not console.is_terminal:
        console = Console(width=LOG_WIDTH)  # a job's log has no width; 80 columns would cut the table
    signal.signal(signal.SIGTERM, interrupt)
    with exiting(errors, interrupted="interrupted; what was finished by now is kept, and the same command goes on from it"):
        name = campaign or campaign_name(catalog)
        check_campaign(name)
        if in_job():
            check_job_locations(store, tracking_uri, json)
        select(recipe or (), portable=False)
        _check_registry_options(catalog, filter_, trust=trust)
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
            only=only,
            filter_string=filter_,
            trust=trust,
            keep_going=keep_going,
            lift_quarantine=lift_quarantine,
            explain=explain,
            mlflow_artifacts=mlflow_artifacts,
            wait_s=wait_limit if wait_for_nodes else None,
        )
        try:
            report = run(config, display_for(console))
        except BadEntriesError as error:
            for problem in error.problems:
                say(errors, problem.coded)
            raise
    if not explain:
        print_report(report, console)
        print_next_steps(report.outcomes, console, store=store, tracking_uri=tracking_uri)
    if json is not None:
        with exiting(errors):
            report.write_json(json)
    sys.exit(report.exit_code)


def _check_registry_options(catalog: str, filter_: str | None, *, trust: bool) -> None:
    """Refuse options that a catalog file does not heed."""
    if is_registry(catalog):
        return
    if filter_ is not None:
        raise UsageError("--filter is for `mlflow:` catalogs; for a file use --only GLOB")
    if trust:
        raise UsageError("--trust is for `mlflow:` catalogs; in a file write `trust: true` in the entries that need it")


def check_job_locations(store: str, tracking_uri: str, json: Path | None) -> None:
    """Refuse places that a job would lose.

    Raises:
        UsageError: one is relative.
    """
    check_absolute({"--store": store, "--tracking-uri": tracking_uri, **({"--json": str(json)} if json is not None else {})})


def campaign_name(catalog: str) -> str:
    """The catalog's own name; a name that cannot be one becomes the time."""
    if is_registry(catalog):
        return "-".join(("mlflow", *catalog.removeprefix("mlflow:").strip("@/").lower().split()))
    stem = Path(catalog).stem.lower()
    return stem if NAME.fullmatch(stem) else datetime.now(UTC).strftime("%Y%m%d-%H%M%S")


def interrupt(number: int, frame: FrameType | None) -> None:
    """Take SIGTERM as Ctrl-C: what is finished is kept."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    app()
