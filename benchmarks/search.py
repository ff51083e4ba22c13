"""Compare what `auto` finds with what `all` finds, and the time that both take, from the ledgers of
two stores.

python -m examples.prepare zoo
coldpress optimize examples/zoo.yaml --recipe all --store store-all --campaign zoo
coldpress optimize examples/zoo.yaml --recipe auto --store store-auto --campaign zoo
python -m benchmarks.search store-all store-auto zoo

The stores must be new, since finished builds are reused. `auto` finds the winner if it publishes
the same recipe, or one that `all`
cannot tell from its winner: its speedup there is within the winner's interval.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pages import markdown_table
from benchmarks.recipes import outcomes_of, speedup_cell
from freezer.hardware import PORTABLE
from freezer.store import Store
from pipeline.records import SKIPPED, Outcome

HEAD = (
    "model",
    "device class",
    "winner of `all`",
    "speedup",
    "winner of `auto`",
    "speedup",
    "found",
    "`all` s",
    "`auto` s",
    "share",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The outcomes of one model and class."""

    all: Outcome
    auto: Outcome

    @property
    def found(self) -> bool:
        """Whether `auto` found the winner."""
        if (self.all.verdict, self.all.recipe) == (
            self.auto.verdict,
            self.auto.recipe,
        ) or self.all.verdict != "published":
            return self.all.verdict == self.auto.verdict
        speeds = {report.recipe: report.figures.speedup for report in self.all.candidates}
        reached, interval = speeds.get(self.auto.recipe or ""), self.all.figures.speedup_ci
        return self.auto.verdict == "published" and bool(
            reached and interval and reached >= interval[0]
        )

    @property
    def share(self) -> float:
        """Time of `auto`, as a share of that of `all`."""
        return seconds(self.auto) / max(seconds(self.all), 1e-9)


def seconds(outcome: Outcome) -> float:
    """Duration of the builds and the judge."""
    return outcome.build_s + outcome.judge_s


def pairs_of(complete: Sequence[Outcome], searched: Sequence[Outcome]) -> list[Pair]:
    """The models and classes that both campaigns judged, without the class `portable`, which has
    one recipe.
    """
    by_name = {(outcome.model, outcome.device_class): outcome for outcome in searched}
    both = [(outcome, by_name.get((outcome.model, outcome.device_class))) for outcome in complete]
    return [
        Pair(all=one, auto=other)
        for one, other in both
        if other is not None and one.device_class != PORTABLE
    ]


def summary(pairs: Sequence[Pair]) -> list[str]:
    """The table and what it comes to."""
    lines = markdown_table(HEAD, [_cells(pair) for pair in pairs])
    total_s = [
        sum(seconds(outcome) for outcome in own)
        for own in ([p.all for p in pairs], [p.auto for p in pairs])
    ]
    skipped = sum(report.failure == SKIPPED for pair in pairs for report in pair.auto.candidates)
    return [
        *lines,
        "",
        (
            f"`auto` found the winner for {sum(pair.found for pair in pairs)} of {len(pairs)}"
            f" models, in {total_s[1]:.0f} s of {total_s[0]:.0f} s (median share"
            f" {statistics.median(pair.share for pair in pairs):.2f}); {skipped} recipes skipped."
        ),
    ]


def _cells(pair: Pair) -> list[str]:
    winners = [
        cell
        for one in (pair.all, pair.auto)
        for cell in (f"{one.recipe or ''} ({one.verdict})", speedup_cell(one.figures))
    ]
    times = [f"{seconds(one):.0f}" for one in (pair.all, pair.auto)]
    return [
        pair.all.model,
        pair.all.device_class,
        *winners,
        "yes" if pair.found else "no",
        *times,
        f"{pair.share:.2f}",
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("all_store", type=Path)
    parser.add_argument("auto_store", type=Path)
    parser.add_argument("campaign")
    given = parser.parse_args()
    complete, searched = (
        outcomes_of(Store.open(str(path)), given.campaign)
        for path in (given.all_store, given.auto_store)
    )
    if not (pairs := pairs_of(complete, searched)):
        parser.error(f"the two stores have no model of a campaign {given.campaign!r} in common")
    print("\n".join(summary(pairs)))


if __name__ == "__main__":
    main()
