"""Print a Markdown table of every recipe of every model of a campaign, from the ledger of a store.

coldpress optimize examples/zoo.yaml --recipe all --campaign zoo
python -m benchmarks.recipes store zoo
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.pages import markdown_table
from freezer.artifact import Measured
from freezer.store import Store
from pipeline.ledger import ledger_folder, read_rows
from pipeline.records import SKIPPED, CandidateReport, Outcome

HEAD = (
    "model",
    "device class",
    "recipe",
    "captured",
    "result",
    "operators",
    "MB",
    "error ratio",
    "speedup (95%)",
    "build s",
)


def outcomes_of(store: Store, campaign: str) -> list[Outcome]:
    """The newest outcome of each model and device class of a campaign, in the order of their first
    outcomes.
    """
    rows = read_rows(ledger_folder(store))
    mine = sorted(
        (row for row in rows if (row.kind, row.campaign) == ("outcome", campaign)),
        key=lambda row: row.time,
    )
    return list(
        {
            (row.model, row.device_class): Outcome.from_json(row.data["outcome"]) for row in mine
        }.values()
    )


def _cells(outcome: Outcome, candidate: CandidateReport) -> Iterator[str]:
    yield from (outcome.model, outcome.device_class, candidate.recipe, candidate.capture or "")
    if candidate.failure == SKIPPED:
        yield str(candidate.problem).replace("|", "\\|")
    elif candidate.failure:
        yield f"failed: {candidate.problem}".replace("|", "\\|")
    elif candidate.problem:
        yield f"rejected: {candidate.problem}".replace("|", "\\|")
    else:
        yield (
            "**published**"
            if (outcome.verdict, outcome.recipe) == ("published", candidate.recipe)
            else "passes"
        )
    yield ", ".join(
        f"{sum(report['ops_before'].values())} → {sum(report['ops_after'].values())}"
        for report in candidate.reports.values()
    )
    yield f"{candidate.size_bytes / 1e6:.1f}" if candidate.size_bytes else ""
    yield from (
        ratio_cell(candidate.figures),
        speedup_cell(candidate.figures),
        f"{candidate.build_s:.1f}",
    )


def ratio_cell(figures: Measured) -> str:
    """The error ratio."""
    ratio = figures.drift.error_ratio
    return "" if ratio is None else f"{ratio:.2f}"


def speedup_cell(figures: Measured) -> str:
    """The speedup with its interval."""
    interval = figures.speedup_ci
    return (
        f"{figures.speedup:.2f} ({interval[0]:.2f}-{interval[1]:.2f})"
        if figures.speedup and interval
        else ""
    )


def main() -> None:
    """Print the table of one campaign."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store", type=Path)
    parser.add_argument("campaign")
    arguments = parser.parse_args()
    found = outcomes_of(Store.open(str(arguments.store)), arguments.campaign)
    if not found:
        parser.error(f"{arguments.store} has no outcome of a campaign {arguments.campaign!r}")
    rows = [
        list(_cells(outcome, candidate)) for outcome in found for candidate in outcome.candidates
    ]
    print("\n".join(markdown_table(HEAD, rows)))


if __name__ == "__main__":
    main()
