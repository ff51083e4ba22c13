"""`python -m jobs.compare BEFORE AFTER`: compare two campaigns; exit code 1 on regressions.

See docs/run-a-fleet.md.
"""

from __future__ import annotations

import json as json_text
import sys
from collections import Counter
from typing import Annotated

import typer
from rich.console import Console

from freezer.codec import encode
from freezer.store import Store
from jobs.exits import exiting
from pipeline.exit_codes import FAILED, OK
from pipeline.ledger import History
from pipeline.reporting import OutcomeChange, compare

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    before: Annotated[str, typer.Argument(help="Name of the earlier campaign.")],
    after: Annotated[str, typer.Argument(help="Name of the later campaign.")],
    store: Annotated[
        str, typer.Option(help="Store of the campaigns: a folder, s3:// or gs://.")
    ] = "./store",
    before_store: Annotated[
        str | None, typer.Option(help="Store of the earlier campaign, if it is another.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare the outcomes of two campaigns: what became slower, drifts more or fails is a
    regression, exit code 1.
    """
    out, errors = Console(soft_wrap=True, highlight=False, markup=False), Console(stderr=True)
    with exiting(errors):
        later = History(Store.open(store))
        earlier = later if before_store is None else History(Store.open(before_store))
        changes = compare(earlier.outcomes(before), later.outcomes(after))
    regressions = sum(change.is_regression for change in changes)
    if json:
        found = {
            "before": before,
            "after": after,
            "regressions": regressions,
            "changes": [encode(one) for one in changes],
        }
        sys.stdout.write(json_text.dumps(found, indent=1) + "\n")
    else:
        for line in _lines(changes):
            out.print(line)
    sys.exit(FAILED if regressions else OK)


def _lines(changes: list[OutcomeChange]) -> list[str]:
    """A line for each change, and a summary."""
    changed = [
        f"{one.kind}: {one.model} {one.device_class}{f': {one.why}' if one.why else ''}"
        for one in changes
    ]
    counts = Counter(one.kind for one in changes)
    return [
        *(line for line, one in zip(changed, changes, strict=True) if one.kind != "unchanged"),
        ", ".join(f"{count} {kind}" for kind, count in counts.items())
        or "neither campaign has outcomes",
    ]


if __name__ == "__main__":
    app()
