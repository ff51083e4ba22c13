"""History of a model: its outcomes over versions of the model, torch and Coldpress, each compared
with the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.ledger import Reached
from pipeline.records import Outcome
from pipeline.reporting.comparison import OutcomeChange, ServedSpeed, compare, served_speed


@dataclass(frozen=True, kw_only=True, slots=True)
class PastOutcome:
    """Figures of one outcome of a model and device class.

    Attributes:
        time: when it was reached, in seconds since the epoch.
        speed: of what served afterwards.
        error_ratio: of the outcome's recipe.
        size_mb: of the payloads of the outcome's recipe, in 1e6 bytes.
        torch, coldpress: versions on the judge's machine.
        change: since the outcome before; None for the first one.
    """

    time: float
    device_class: str
    verdict: str
    version: int | None
    recipe: str | None
    speed: ServedSpeed | None
    error_ratio: float | None
    size_mb: float | None
    build_s: float
    torch: str | None
    coldpress: str | None
    change: OutcomeChange | None


def past_outcomes(past: Sequence[Reached]) -> dict[str, list[PastOutcome]]:
    """Return the history of each device class.

    Args:
        past: outcomes of one model, the oldest first.
    """
    found: dict[str, list[PastOutcome]] = {}
    before: dict[str, Outcome] = {}
    for item in past:
        name = item.outcome.device_class
        found.setdefault(name, []).append(_figures(item, before.get(name)))
        before[name] = item.outcome
    return found


def _figures(item: Reached, before: Outcome | None) -> PastOutcome:
    outcome = item.outcome
    speed = served_speed(outcome)
    return PastOutcome(
        time=item.time,
        device_class=outcome.device_class,
        verdict=outcome.verdict,
        version=outcome.version,
        recipe=speed.recipe if speed else outcome.recipe,
        speed=speed,
        error_ratio=outcome.figures.drift.error_ratio,
        size_mb=size_mb(outcome),
        build_s=outcome.build_s,
        torch=outcome.host.get("torch"),
        coldpress=outcome.host.get("coldpress"),
        change=compare([before], [outcome])[0] if before else None,
    )


def size_mb(outcome: Outcome) -> float | None:
    """Return the size of the payloads of an outcome's recipe, in 1e6 bytes; None without a recipe
    that was built.
    """
    return next(
        (
            one.size_bytes / 1e6
            for one in outcome.candidates
            if one.recipe == outcome.recipe and one.size_bytes
        ),
        None,
    )
