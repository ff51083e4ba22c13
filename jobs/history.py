"""`coldpress history MODEL`: a model's speed, drift, size and build time over time."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from freezer.cli import JsonOption, StoreOption, exiting, say, say_json
from freezer.codec import encode
from freezer.errors import INFRASTRUCTURE, UsageError
from freezer.store import Store
from pipeline.ledger import History
from pipeline.records import STYLES, rounded
from pipeline.reporting import Columns, PastOutcome, fitting_table, past_outcomes

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_COLUMNS = Columns(
    names=(
        *("date (UTC)", "verdict", "recipe", "speedup", "error", "MB"),
        *("build s", "torch", "change"),
    ),
    numeric=("speedup", "error", "MB", "build s"),
    dropped_first=("torch", "build s", "MB", "error"),
)


@app.command()
@exiting(refused=INFRASTRUCTURE)
def main(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    store: StoreOption = "./store",
    device_class: Annotated[str | None, typer.Option(help="Only this class. Default: all.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print what every campaign found for a model, the latest first; regressions are marked."""
    history = History(Store.open(store))
    by_class = past_outcomes(history.of_model(model, device_class))
    if not by_class:
        models = ", ".join(history.models()) or "none"
        of_class = f" for {device_class}" if device_class else ""
        raise UsageError(
            f"the ledger of {store} has no outcome of {model!r}{of_class}; it has models: {models}"
        )
    if as_json:
        encoded = {}
        for name, outcomes in by_class.items():
            encoded[name] = [encode(outcome) for outcome in outcomes]
        say_json(encoded, indent=1)
        return
    console = Console(highlight=False)
    for name, outcomes in by_class.items():
        rows = [_cells(outcome) for outcome in reversed(outcomes)]
        console.print(fitting_table(_COLUMNS, rows, console, title=f"{model} on {name}"))
        for outcome in reversed(outcomes):
            change = outcome.change
            if change and change.is_regression:
                say(f"{_day(outcome.time)} {change.kind}: {change.why}", "red")


def _cells(outcome: PastOutcome) -> dict[str, Text | str]:
    """The cells of an outcome by column."""
    change = outcome.change
    version = f" v{outcome.version}" if outcome.version else ""
    shown = Text()
    if change and change.kind != "unchanged":
        shown = Text(change.kind, "bold red" if change.is_regression else "")
    return {
        "date (UTC)": _day(outcome.time),
        "verdict": Text(f"{outcome.verdict}{version}", STYLES.get(outcome.verdict, "")),
        "recipe": outcome.recipe or "",
        "speedup": f"{outcome.speed.value:.2f}x" if outcome.speed else "",
        "error": rounded(outcome.error_ratio),
        "MB": rounded(outcome.size_mb),
        "build s": f"{outcome.build_s:.0f}",
        "torch": (outcome.torch or "").partition("+")[0],
        "change": shown,
    }


def _day(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%m-%d %H:%M")


if __name__ == "__main__":
    app()
