"""`python -m jobs.replay CAMPAIGN`: bring MLflow up to date from the ledger. See docs/operate.md."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer
from rich.console import Console

from freezer.errors import InfrastructureError, StoreError, UsageError
from freezer.store import Store
from pipeline.replay import replay

USAGE, INFRASTRUCTURE, INTERRUPTED = 2, 3, 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    campaign: Annotated[str | None, typer.Argument(help="The campaign to show.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Show every campaign of the store, in order of time.")] = False,
    store: Annotated[str, typer.Option(help="That the campaign published to: a local folder.")] = "./store",
    tracking_uri: Annotated[str, typer.Option(help="Of MLflow.")] = "sqlite:///mlflow.db",
    mlflow_artifacts: Annotated[
        Literal["copy", "reference"], typer.Option(help="Whether MLflow holds whole artifacts, or references to the store.")
    ] = "copy",
) -> None:
    """Log a campaign's outcomes to MLflow, as far as it does not show them already. Doing it again changes nothing."""
    console, errors = Console(), Console(stderr=True)
    try:
        if every == (campaign is not None):
            raise UsageError("name one campaign, or all with --all")
        done = replay(
            Store.open(store),
            tracking_uri,
            campaign,
            mode=mlflow_artifacts,
            say=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
        )
    except UsageError as error:
        _say(errors, error.coded)
        sys.exit(USAGE)
    except (InfrastructureError, StoreError) as error:
        _say(errors, error.coded)
        sys.exit(INFRASTRUCTURE)
    except KeyboardInterrupt:
        _say(errors, "interrupted; the same command goes on from here")
        sys.exit(INTERRUPTED)
    sys.exit(INFRASTRUCTURE if done.failures else 0)


def _say(console: Console, text: str) -> None:
    console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app()
