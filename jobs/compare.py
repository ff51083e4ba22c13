"""`coldpress compare BEFORE AFTER`: compare two campaigns; exit code 1 on regressions."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import typer

from freezer.cli import JsonOption, StoreOption, exiting, say, say_json
from freezer.codec import encode
from freezer.errors import FAILED, INFRASTRUCTURE, OK
from freezer.store import Store
from pipeline.ledger import History
from pipeline.reporting import OutcomeChange, compare

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@exiting(refused=INFRASTRUCTURE)
def main(
    before: Annotated[str, typer.Argument(help="Name of the earlier campaign.")],
    after: Annotated[str, typer.Argument(help="Name of the later campaign.")],
    store: StoreOption = "./store",
    as_json: JsonOption = False,
) -> None:
    """Compare the outcomes of two campaigns: what became slower, drifts more or fails is a
    regression, exit code 1.
    """
    history = History(Store.open(store))
    changes = compare(history.outcomes(before), history.outcomes(after))
    regressions = sum(change.is_regression for change in changes)
    if as_json:
        encoded = [encode(change) for change in changes]
        summary = {"before": before, "after": after, "regressions": regressions}
        say_json({**summary, "changes": encoded}, indent=1)
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
    say(summary or "neither campaign has outcomes")


if __name__ == "__main__":
    app()
