"""What `coldpress verify --speed` measured. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SpeedCheck:
    """What was timed. A ratio is how many times as fast as the portable artifact.

    Attributes:
        expected: by the manifests; `measured` here, with its 95% confidence interval from `low` to `high`.
        num_threads, point: that both were timed with.
        median_ms: by device class.
        num_rounds, num_dropped: that were timed undisturbed, and that others disturbed.
    """

    device_class: str
    expected: float
    measured: float
    low: float
    high: float
    num_threads: int
    point: Mapping[str, int]
    median_ms: Mapping[str, float]
    num_rounds: int
    num_dropped: int

    def __str__(self) -> str:
        sizes = "".join(f", {name} {size}" for name, size in self.point.items())
        medians = ", ".join(f"{name} {median:.3g} ms" for name, median in self.median_ms.items())
        interval = f"{self.low:.2f} to {self.high:.2f}"
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        return f"{self.measured:.2f} times as fast as portable here ({interval}; {medians}; {threads}{sizes})"
