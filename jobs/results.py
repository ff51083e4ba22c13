"""`coldpress status`, `report`, `compare`, `history` and `replay`: campaigns, from the ledger."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from freezer.cli import JsonOption, StoreOption, command_app, exiting, note, say, say_json, table
from freezer.codec import encode
from freezer.errors import FAILED, INFRASTRUCTURE, OK, InfrastructureError, UsageError
from freezer.files import check_file, make_folder, write_whole
from freezer.store import Move, Store, versions_of
from pipeline.records import STYLES, counts_text, iso, rounded

if TYPE_CHECKING:
    from pipeline.reporting import OutcomeChange, PastOutcome

report_app = command_app()
compare_app = command_app()
history_app = command_app()
status_app = command_app()
replay_app = command_app()

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

_COLUMNS = (
    *("date (UTC)", "verdict", "change", "recipe"),
    *("speedup", "error", "MB", "build s", "torch"),
)


@status_app.command()
@exiting(refused=INFRASTRUCTURE)
def status(
    campaign: Annotated[
        str | None,
        Argument(help="Name of the campaign. Default: list all campaigns of the store."),
    ] = None,
    store: StoreOption = "./store",
    as_json: JsonOption = False,
) -> None:
    """Print the progress of a campaign, whether it is running, has ended, or its driver died."""
    from pipeline.reporting import campaign_status, campaigns_in_words, in_words

    opened = Store.open(store)
    if campaign is not None:
        found = campaign_status(opened, campaign, note)
        lines = in_words(found, store)
        if as_json:
            say_json(found.to_json(), indent=1)
            return
    elif as_json:
        raise UsageError("--json needs the name of a campaign")
    else:
        lines = campaigns_in_words(opened, note)
    for line in lines:
        say(line)


@report_app.command()
@exiting(refused=INFRASTRUCTURE)
def report(
    campaign: Annotated[str, Argument(help="Name of the campaign.")],
    store: StoreOption = "./store",
    out: Annotated[
        Path | None,
        Option(help="File to write. Default: report-CAMPAIGN.html; let git ignore report-*.html."),
    ] = None,
) -> None:
    """Write the report of a campaign: one HTML file that needs no network."""
    from pipeline.reporting import report_page

    out = out or Path(f"report-{campaign}.html")
    check_file(out, "--out")
    page = report_page(Store.open(store), campaign)
    try:
        make_folder(out.parent)
        write_whole(out, page)
    except OSError as error:
        raise InfrastructureError(f"--out {out} cannot be written: {error}") from error
    say(f"wrote {out.absolute()} ({len(page) / 1e3:.0f} kB)")


@compare_app.command()
@exiting(refused=INFRASTRUCTURE)
def compare_campaigns(
    before: Annotated[str, Argument(help="Name of the earlier campaign.")],
    after: Annotated[str, Argument(help="Name of the later campaign.")],
    store: StoreOption = "./store",
    as_json: JsonOption = False,
) -> None:
    """Compare the outcomes of two campaigns in their last finished passes: what became slower,
    drifts more or fails is a regression, exit code 1.
    """
    from pipeline.ledger import History
    from pipeline.reporting import compare

    history = History(Store.open(store))
    old, new = (
        history.outcomes(campaign, history.last_pass(campaign)) for campaign in (before, after)
    )
    changes = compare(old, new)
    regressions = sum(change.is_regression for change in changes)
    if as_json:
        summary = {
            "before": before,
            "after": after,
            "regressions": regressions,
            "changes": list(map(encode, changes)),
        }
        say_json(summary, indent=1)
    else:
        _print_changes(changes)
    sys.exit(FAILED if regressions else OK)


def _print_changes(changes: Sequence[OutcomeChange]) -> None:
    """Print a line for each change, and a summary."""
    for change in changes:
        if change.kind != "unchanged":
            reason = f": {change.why}" if change.why else ""
            say(f"{change.kind}: {change.model} {change.device_class}{reason}")
    counts = Counter(change.kind for change in changes)
    say(counts_text(counts.items()))


@history_app.command()
@exiting(refused=INFRASTRUCTURE)
def history(
    model: Annotated[str, Argument(help="Name of the model.")],
    store: StoreOption = "./store",
    as_json: JsonOption = False,
) -> None:
    """Print what names of a model pointed at, and what every campaign found for it, the latest
    first; regressions are marked.
    """
    from pipeline.ledger import History
    from pipeline.reporting import past_outcomes

    opened = Store.open(store)
    ledger = None if opened.registry is not None else History(opened)
    by_class = past_outcomes(ledger.of_model(model)) if ledger else {}
    moves = _moves(opened, model) if opened.versions(model) else []
    if not by_class and not moves:
        models = ", ".join(ledger.models() if ledger else opened.models()) or "none"
        raise UsageError(f"{store} has no history of {model!r}; it has models: {models}")
    if as_json:
        encoded = {name: list(map(encode, outcomes)) for name, outcomes in by_class.items()}
        say_json({"names": list(map(encode, moves)), "classes": encoded}, indent=1)
        return
    console = Console(highlight=False)
    _print_moves(moves, console)
    _print_outcomes(model, by_class, console)


def _moves(store: Store, model: str) -> list[Move]:
    """The moves of all names of a model, the latest first; versions were `latest` when they were
    published.
    """
    published = [
        Move(
            name="latest",
            version=listed.version,
            digest=listed.digest,
            before=0,
            by="published",
            time=listed.published,
        )
        for listed in versions_of(store, model)
    ]
    return sorted([*store.notes(model).moves, *published], key=lambda move: -move.time)


def _print_moves(moves: Sequence[Move], console: Console) -> None:
    rows = table("date (UTC)", "name", "version", "before", "share", "by")
    for move in moves:
        rows.add_row(
            _day(move.time) if move.time else "",
            move.name,
            str(move.version or "removed"),
            str(move.before or ""),
            "" if move.share is None else f"{move.share:.4g}",
            move.by,
        )
    console.print(rows)


def _print_outcomes(
    model: str, by_class: Mapping[str, Sequence[PastOutcome]], console: Console
) -> None:
    from pipeline.reporting import result_table

    for name, outcomes in by_class.items():
        console.print(
            result_table(
                _COLUMNS,
                map(_cells, reversed(outcomes)),
                console,
                narrow=7,
                title=f"{model} on {name}",
            )
        )
        for outcome in reversed(outcomes):
            change = outcome.change
            if change and change.is_regression:
                say(f"{_day(outcome.time)} {change.kind}: {change.why}", "red")


def _cells(outcome: PastOutcome) -> list[Text | str]:
    change = outcome.change
    version = f" v{outcome.version}" if outcome.version else ""
    shown = Text()
    if change and change.kind != "unchanged":
        shown = Text(change.kind, "bold red" if change.is_regression else "")
    return [
        _day(outcome.time),
        Text(f"{outcome.verdict}{version}", STYLES.get(outcome.verdict, "")),
        shown,
        outcome.recipe or "",
        f"{outcome.speed.mark}{outcome.speed.value:.2f}x" if outcome.speed else "",
        rounded(outcome.error_ratio),
        rounded(outcome.size_mb),
        f"{outcome.build_s:.0f}",
        (outcome.torch or "").partition("+")[0],
    ]


def _day(time: float) -> str:
    return iso(time)[5:16].replace("T", " ")


@replay_app.command()
@exiting(refused=INFRASTRUCTURE, interrupted="interrupted; run the same command to continue")
def replay(
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
    from pipeline.tracking import default_tracking_uri
    from pipeline.tracking import replay as replay_

    if every == (campaign is not None):
        raise UsageError("expected one campaign, or --all")
    failures = replay_(
        Store.open(store),
        tracking_uri or default_tracking_uri(),
        campaign,
        mode=mlflow_artifacts,
        page=report_page,
        say=say,
    )
    sys.exit(INFRASTRUCTURE if failures else OK)
