"""Is a new artifact worse than the one before? The judge and `compare` decide it here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MORE_DRIFT = 2.0
"""Growth of the error ratio, or of eager's own 1 if that is larger, that counts as drift."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedChange:
    """Speed of a new artifact as a multiple of the one before.

    Attributes:
        value: ratio of the speeds.
        low, high: bounds of its confidence interval.
        least_loss: least slowdown factor that counts: `high` must be below 1 / `least_loss`.
        noise: relative change of `value` that two separate measurements may show; None if both were
            timed in the same rounds.
    """

    value: float
    low: float
    high: float
    least_loss: float = 1.0
    noise: float | None = None

    @property
    def slower(self) -> bool:
        """Whether the new artifact is slower for certain."""
        below = self.noise is None or self.value < 1 - self.noise
        return self.high < 1.0 / self.least_loss and below

    @property
    def faster(self) -> bool:
        """Whether the new artifact is faster for certain."""
        above = self.noise is None or self.value > 1 + self.noise
        return self.low > 1.0 and above


def regression_kind(
    speed: SpeedChange | None, error_ratio_before: float | None, error_ratio: float | None
) -> Literal["slower", "drifted"] | None:
    """How a new artifact is worse than the one before; None if it is not.

    More drift is accepted of an artifact that is faster.

    Args:
        speed: change of the speed; None if it is unknown.
        error_ratio_before: error ratio of the artifact before; None if it is unknown.
        error_ratio: error ratio of the new artifact; None if it is unknown.
    """
    if speed is not None and speed.slower:
        return "slower"
    if error_ratio_before is None or error_ratio is None or (speed is not None and speed.faster):
        return None
    return "drifted" if error_ratio > MORE_DRIFT * max(error_ratio_before, 1.0) else None
