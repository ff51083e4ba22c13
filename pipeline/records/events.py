"""Events that a campaign shows while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pipeline.records.outcome import Outcome
from pipeline.records.row import Row

STYLES = {
    "published": "green",
    "kept-eager": "cyan",
    "kept-previous": "blue",
    "rejected": "yellow",
    "failed": "red",
    "unstable": "magenta",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """The start or end of a step.

    Attributes:
        kind: `note` is about the campaign; `build` and `judge` start, `built` and `judged` end,
            `retried` ends without a result; `outcome` is final: published and in the ledger.
        what: `model device_class`.
        recipes: of builds: those that start together, or the one that ended.
        text: details for people.
        seconds: duration of what ended.
        unstable: whether other processes disturbed the judge that ended.
    """

    kind: Literal["note", "build", "built", "judge", "judged", "retried", "outcome"]
    what: str = ""
    recipes: tuple[str, ...] = ()
    text: str = ""
    seconds: float = 0.0
    outcome: Outcome | None = None
    unstable: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveFigures:
    """Figures of a running campaign that no event carries.

    Attributes:
        nodes: number of nodes in use, by device class.
        num_logged, num_unlogged: final outcomes that MLflow shows, and those that it lacks.
    """

    nodes: Mapping[str, int] = field(default_factory=dict)
    num_logged: int = 0
    num_unlogged: int = 0


def verdict_text(outcome: Outcome) -> str:
    """Return a verdict in a few words: `published inductor-frozen 1.84x (1.79-1.90)`."""
    words = ["unchanged:", outcome.verdict] if outcome.cached else [outcome.verdict]
    if outcome.verdict == "failed":
        words.append(f"({outcome.failure_kind})")
    if outcome.recipe:
        words.append(outcome.recipe)
    if outcome.figures.speedup is not None:
        words.append(Row.of(outcome).speedup_text)
    if outcome.code is not None:  # the report has the reason
        words.append(outcome.code)
    return " ".join(words)
