"""What every recipe made of every model of a store, as a Markdown table; read from the ledger of a campaign.

python -m jobs.optimize examples/zoo.yaml --recipe all --campaign zoo
python -m benchmarks.recipes store zoo
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from freezer.store.store import Store
from pipeline.ledger.ledger import ledger_folder
from pipeline.ledger.segments import Kind, read_rows
from pipeline.records.outcome import CandidateReport, Outcome

OUTCOME: Kind = "outcome"

HEAD = ("model", "device class", "recipe", "captured", "result", "operators", "MB", "error ratio", "speedup (95%)", "build s")


def outcomes_of(store: Store, campaign: str) -> list[Outcome]:
    """The newest outcome of each model and device class of a campaign, in the order in which they were first had."""
    rows = read_rows(ledger_folder(store), kinds=(OUTCOME,))
    mine = sorted((row for row in rows if row.campaign == campaign), key=lambda row: row.time)
    return list({(row.model, row.device_class): Outcome.from_json(row.data["outcome"]) for row in mine}.values())


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The lines of the table: one for each recipe of each outcome."""
    yield f"| {' | '.join(HEAD)} |"
    yield "|" + "---|" * len(HEAD)
    for outcome in outcomes:
        for candidate in outcome.candidates:
            yield f"| {outcome.model} | {outcome.device_class} | {' | '.join(_cells(outcome, candidate))} |"


def _cells(outcome: Outcome, candidate: CandidateReport) -> Iterator[str]:
    yield candidate.recipe
    yield candidate.capture or ""
    if candidate.failure:
        yield f"failed: {candidate.problem}".replace("|", "\\|")
    elif candidate.problem:
        yield f"rejected: {candidate.problem}".replace("|", "\\|")
    else:
        yield "**published**" if (outcome.verdict, outcome.recipe) == ("published", candidate.recipe) else "passes"
    yield ", ".join(
        f"{sum(report['ops_before'].values())} → {sum(report['ops_after'].values())}" for report in candidate.reports.values()
    )
    yield f"{candidate.size_bytes / 1e6:.1f}" if candidate.size_bytes else ""
    ratio = (candidate.figures.drift or {}).get("error_ratio")
    yield "" if ratio is None else f"{ratio:.2f}"
    interval = candidate.figures.speedup_ci
    yield f"{candidate.figures.speedup:.2f} ({interval[0]:.2f}-{interval[1]:.2f})" if candidate.figures.speedup and interval else ""
    yield f"{candidate.build_s:.1f}"


def main() -> None:
    """Print the table of one campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("campaign")
    arguments = parser.parse_args()
    found = outcomes_of(Store.open(str(arguments.store)), arguments.campaign)
    if not found:
        parser.error(f"{arguments.store} has no outcome of a campaign {arguments.campaign!r}")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
