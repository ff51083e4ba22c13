"""`python -m jobs.replay CAMPAIGN`: bring MLflow up to date from the ledger.

See docs/operate.md.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer
from rich.console import Console

from freezer.errors import UsageError
from freezer.store import Store
from jobs.exits import exiting
from pipeline.exit_codes import INFRASTRUCTURE, OK
from pipeline.reporting import report_page
from pipeline.tracking import replay

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    campaign: Annotated[str | None, typer.Argument(help="Name of the campaign.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Replay every campaign of the store, oldest first.")
    ] = False,
    store: Annotated[
        str, typer.Option(help="Store of the campaign: a folder, s3:// or gs://.")
    ] = "./store",
    tracking_uri: Annotated[str, typer.Option(help="URI of MLflow.")] = "sqlite:///mlflow.db",
    mlflow_artifacts: Annotated[
        Literal["copy", "reference"],
        typer.Option(help="Whether MLflow stores whole artifacts, or references to the store."),
    ] = "copy",
) -> None:
    """Log outcomes of a campaign that MLflow does not show. Repeating it changes nothing."""
    console, errors = Console(), Console(stderr=True)
    with exiting(errors, interrupted="interrupted; run the same command to continue"):
        if every == (campaign is not None):
            raise UsageError("expected one campaign, or --all")
        failures = replay(
            Store.open(store),
            tracking_uri,
            campaign,
            mode=mlflow_artifacts,
            page=report_page,
            say=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
        )
    sys.exit(INFRASTRUCTURE if failures else OK)


if __name__ == "__main__":
    app()
