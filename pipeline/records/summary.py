"""Summary of a campaign's outcomes: counts, largest gains, and what was not published.

Pages and descriptions show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from freezer.hardware import PORTABLE
from pipeline.records.outcome import Outcome

NUM_GAINS = 3
"""Gains that a summary lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unpublished:
    """Outcomes of one model with the same verdict and reason.

    Attributes:
        code: error code or type of failure; empty if it did not fail.
    """

    model: str
    device_classes: tuple[str, ...]
    verdict: str
    code: str
    reason: str
    failed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Summary of a campaign.

    Attributes:
        counts: number of outcomes by verdict, the most frequent first.
        gains: the published outcomes with the largest speedups, one for each model, without
            `portable`.
        unpublished: failed ones first.
    """

    counts: dict[str, int]
    gains: tuple[Outcome, ...]
    unpublished: tuple[Unpublished, ...]


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    """Summarize outcomes, in the order of the catalog."""
    best: dict[str, Outcome] = {}
    for one in sorted(outcomes, key=lambda one: one.figures.speedup or 0.0, reverse=True):
        if one.verdict == "published" and one.figures.speedup and one.device_class != PORTABLE:
            best.setdefault(one.model, one)
    alike: dict[tuple[str, str, str, str, bool], list[str]] = {}
    for one in outcomes:
        if one.verdict != "published":
            kind = (
                one.model,
                one.verdict,
                one.code or one.failure_kind or "",
                one.reason or "",
                one.failed,
            )
            alike.setdefault(kind, []).append(one.device_class)
    return Summary(
        counts=dict(Counter(one.verdict for one in outcomes).most_common()),
        gains=tuple(best.values())[:NUM_GAINS],
        unpublished=tuple(
            Unpublished(
                model=model,
                device_classes=tuple(classes),
                verdict=verdict,
                code=code,
                reason=reason,
                failed=failed,
            )
            for (model, verdict, code, reason, failed), classes in sorted(
                alike.items(), key=lambda item: not item[0][4]
            )
        ),
    )
