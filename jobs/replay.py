"""`coldpress replay CAMPAIGN`: bring MLflow up to date from the ledger.

See docs/guides/operate.md.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from freezer.cli import StoreOption, exiting, say
from freezer.errors import INFRASTRUCTURE, OK, UsageError
from freezer.store import Store

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

TrackingOption = Annotated[
    str | None,
    Option(
        "--tracking-uri",
        envvar="MLFLOW_TRACKING_URI",
        help="URI of MLflow. Default: sqlite:///mlflow.db.",
    ),
]
MlflowArtifactsOption = Annotated[
    Literal["copy", "reference"],
    Option(help="Whether MLflow stores whole artifacts, or references to the store."),
]


@app.command()
@exiting(refused=INFRASTRUCTURE, interrupted="interrupted; run the same command to continue")
def main(
    campaign: Annotated[str | None, Argument(help="Name of the campaign.")] = None,
    every: Annotated[
        bool, Option("--all", help="Replay every campaign of the store, oldest first.")
    ] = False,
    store: StoreOption = "./store",
    tracking_uri: TrackingOption = None,
    mlflow_artifacts: MlflowArtifactsOption = "copy",
) -> None:
    """Log outcomes of a campaign that MLflow does not show. Repeating it changes nothing."""
    from pipeline.reporting import report_page
    from pipeline.tracking import default_tracking_uri, replay

    if every == (campaign is not None):
        raise UsageError("expected one campaign, or --all")
    opened = Store.open(store)
    failures = replay(
        opened,
        tracking_uri or default_tracking_uri(),
        campaign,
        mode=mlflow_artifacts,
        page=report_page,
        say=say,
    )
    sys.exit(INFRASTRUCTURE if failures else OK)


if __name__ == "__main__":
    app()
