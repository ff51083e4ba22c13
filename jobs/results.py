"""`coldpress report`, `compare` and `history`: the results of campaigns, from the ledger."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from freezer.cli import JsonOption, StoreOption, exiting, say, say_json
from freezer.codec import encode
from freezer.errors import FAILED, INFRASTRUCTURE, OK, InfrastructureError, UsageError
from freezer.files import check_file, make_folder, write_whole
from freezer.store import Store
from pipeline.records import STYLES, iso, rounded

if TYPE_CHECKING:
    from pipeline.reporting import OutcomeChange, PastOutcome

report_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
compare_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
history_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_COLUMNS = (
    *("date (UTC)", "verdict", "change", "recipe"),
    *("speedup", "error", "MB", "build s", "torch"),
)


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
        summary = {"before": before, "after": after, "regressions": regressions}
        say_json({**summary, "changes": list(map(encode, changes))}, indent=1)
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
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    say(summary)


@history_app.command()
@exiting(refused=INFRASTRUCTURE)
def history(
    model: Annotated[str, Argument(help="Name of the model.")],
    store: StoreOption = "./store",
    as_json: JsonOption = False,
) -> None:
    """Print what every campaign found for a model, the latest first; regressions are marked."""
    from pipeline.ledger import History
    from pipeline.reporting import past_outcomes, result_table

    ledger = History(Store.open(store))
    by_class = past_outcomes(ledger.of_model(model))
    if not by_class:
        models = ", ".join(ledger.models()) or "none"
        raise UsageError(
            f"the ledger of {store} has no outcome of {model!r}; it has models: {models}"
        )
    if as_json:
        encoded = {name: list(map(encode, outcomes)) for name, outcomes in by_class.items()}
        say_json(encoded, indent=1)
        return
    console = Console(highlight=False)
    for name, outcomes in by_class.items():
        rows = [_cells(outcome) for outcome in reversed(outcomes)]
        title = f"{model} on {name}"
        console.print(
            result_table(
                _COLUMNS,
                rows,
                console,
                narrow=7,
                title=title,
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
