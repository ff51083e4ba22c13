"""`coldpress history MODEL`, or `python -m jobs.history MODEL`: a model's speed, drift, size and
build time over time.
"""

from __future__ import annotations

import json as json_text
import sys
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from freezer.codec import encode
from freezer.errors import UsageError
from freezer.store import Store
from jobs.exits import exiting
from pipeline.ledger import History
from pipeline.records import STYLES
from pipeline.reporting import PastOutcome, past_outcomes

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_COLUMNS = (
    "date (UTC)",
    "verdict",
    "recipe",
    "speedup",
    "error",
    "MB",
    "build s",
    "torch",
    "change",
)
_RIGHT = ("speedup", "error", "MB", "build s")
_DROPPED_FIRST = ("torch", "build s", "MB", "error")
"""Columns to drop on a narrow terminal, in order."""


@app.command()
def main(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    store: Annotated[
        str, typer.Option(help="Store of the campaigns: a folder, s3:// or gs://.")
    ] = "./store",
    device_class: Annotated[str | None, typer.Option(help="Only this class. Default: all.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what every campaign found for a model, the latest first; regressions are marked."""
    out, errors = Console(highlight=False), Console(stderr=True)
    with exiting(errors):
        history = History(Store.open(store))
        past = past_outcomes(history.of_model(model, device_class))
        if not past:
            known = ", ".join(history.models()) or "none"
            of_class = f" for {device_class}" if device_class else ""
            raise UsageError(
                f"the ledger of {store} has no outcome of {model!r}{of_class}; it has models:"
                f" {known}"
            )
    if json:
        sys.stdout.write(
            json_text.dumps(
                {name: [encode(one) for one in own] for name, own in past.items()}, indent=1
            )
            + "\n"
        )
        return
    for name, own in past.items():
        out.print(_table(f"{model} on {name}", own, out))
        for one in reversed(own):
            if one.change and one.change.is_regression:
                out.print(
                    Text(f"{_day(one.time)} {one.change.kind}: {one.change.why}", style="red"),
                    soft_wrap=True,
                )


def _table(title: str, past: list[PastOutcome], console: Console) -> Table:
    """The outcomes of a device class, the latest first, with the columns that fit the console."""
    columns = list(_COLUMNS)
    for dropped in ("", *_DROPPED_FIRST):
        columns = [name for name in columns if name != dropped]
        table = Table(
            title=title,
            title_justify="left",
            header_style="bold",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        for name in columns:
            table.add_column(name, justify="right" if name in _RIGHT else "left", overflow="fold")
        for one in reversed(past):
            cells = _cells(one)
            table.add_row(*(cells[name] for name in columns))
        if (
            Measurement.get(console, console.options.update(max_width=1000), table).maximum
            <= console.width
        ):
            break
    return table


def _cells(one: PastOutcome) -> dict[str, Text | str]:
    change = one.change
    shown = change.kind if change and change.kind != "unchanged" else ""
    return {
        "date (UTC)": _day(one.time),
        "verdict": Text(
            one.verdict + (f" v{one.version}" if one.version else ""),
            style=STYLES.get(one.verdict, ""),
        ),
        "recipe": one.recipe or "",
        "speedup": f"{one.speed.value:.2f}x" if one.speed else "",
        "error": _short(one.error_ratio),
        "MB": _short(one.size_mb),
        "build s": f"{one.build_s:.0f}",
        "torch": (one.torch or "").partition("+")[0],
        "change": Text(shown, style="bold red" if change and change.is_regression else ""),
    }


def _day(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%m-%d %H:%M")


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    app()
