"""Measurements of a candidate against eager. Judges, candidates, outcomes and reports share this record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Speed and drift of one candidate; None where nothing was measured.

    Attributes:
        speedup: over eager, at the deciding thread count and the first point.
        speedup_ci: its 95% confidence interval.
        drift: `error_ratio`, `max_abs_err`, `sqnr_db`, `margin`.
        latency_ms: `p50`, `p90`, `p99`; of an outcome also `eager_p50`.
    """

    speedup: float | None = None
    speedup_ci: tuple[float, float] | None = None
    drift: Mapping[str, float | None] | None = None
    latency_ms: Mapping[str, float | None] | None = None


UNMEASURED = Figures()
