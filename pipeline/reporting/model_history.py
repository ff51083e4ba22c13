"""History of a model: its outcomes over versions of the model, torch and Coldpress, each compared
with the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.ledger import Reached
from pipeline.records import Outcome, Row
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
    history: dict[str, list[PastOutcome]] = {}
    before: dict[str, Outcome] = {}
    for reached in past:
        outcome = reached.outcome
        name, row, speed = outcome.device_class, Row.of(outcome), served_speed(outcome)
        change = compare([before[name]], [outcome])[0] if name in before else None
        shown = PastOutcome(
            time=reached.time,
            device_class=name,
            verdict=row.verdict,
            version=row.version,
            recipe=speed.recipe if speed else row.recipe,
            speed=speed,
            error_ratio=row.error_ratio,
            size_mb=row.size_mb,
            build_s=row.build_s,
            torch=outcome.host.get("torch"),
            coldpress=outcome.host.get("coldpress"),
            change=change,
        )
        history.setdefault(name, []).append(shown)
        before[name] = outcome
    return history
