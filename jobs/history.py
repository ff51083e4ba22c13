"""`coldpress history MODEL`, or `python -m jobs.history MODEL`: a model's speed, drift, size and
build time over time.
"""

from __future__ import annotations

import json as json_text
import sys
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from freezer.codec import encode
from freezer.errors import UsageError
from freezer.store import Store
from jobs.exits import exiting
from pipeline.ledger import History
from pipeline.records import STYLES, rounded
from pipeline.reporting import Columns, PastOutcome, fitting_table, past_outcomes

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_COLUMNS = Columns(
    names=(
        "date (UTC)",
        "verdict",
        "recipe",
        "speedup",
        "error",
        "MB",
        "build s",
        "torch",
        "change",
    ),
    numeric=("speedup", "error", "MB", "build s"),
    dropped_first=("torch", "build s", "MB", "error"),
)


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
        rows = [_cells(one) for one in reversed(own)]
        out.print(fitting_table(_COLUMNS, rows, out, title=f"{model} on {name}"))
        for one in reversed(own):
            if one.change and one.change.is_regression:
                out.print(
                    Text(f"{_day(one.time)} {one.change.kind}: {one.change.why}", style="red"),
                    soft_wrap=True,
                )


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
        "error": rounded(one.error_ratio),
        "MB": rounded(one.size_mb),
        "build s": f"{one.build_s:.0f}",
        "torch": (one.torch or "").partition("+")[0],
        "change": Text(shown, style="bold red" if change and change.is_regression else ""),
    }


def _day(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%m-%d %H:%M")


if __name__ == "__main__":
    app()
