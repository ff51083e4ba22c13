"""Measurements of one candidate: speed and drift. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from freezer.codec import OMIT_DEFAULT


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredDrift:
    """Distance of a candidate's outputs from the reference, the worst of all calls; None where it
    was not compared, or no output is floating-point.

    Attributes:
        error_ratio: largest error relative to eager's own.
        max_abs_err: largest absolute error.
        sqnr_db: smallest signal-to-quantization-noise ratio.
        margin: smallest ratio of bound to error.
    """

    error_ratio: float | None = None
    max_abs_err: float | None = None
    sqnr_db: float | None = None
    margin: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLatency:
    """Percentiles of a candidate's latency in milliseconds; None where it was not timed, or had
    too few samples.

    Attributes:
        eager_p50: median latency of eager in the same rounds; None for a candidate of an outcome,
            which has it.
        p95: measured if it is the objective.
    """

    eager_p50: float | None = field(default=None, metadata=OMIT_DEFAULT)
    p50: float | None = None
    p90: float | None = None
    p95: float | None = field(default=None, metadata=OMIT_DEFAULT)
    p99: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Speed and drift of one candidate; None where nothing was measured.

    Attributes:
        speedup: speedup over eager, at the deciding thread count and the first point.
        speedup_ci: 95% confidence interval of the speedup.
    """

    speedup: float | None = None
    speedup_ci: tuple[float, float] | None = None
    drift: MeasuredDrift = MeasuredDrift()
    latency_ms: MeasuredLatency = MeasuredLatency()


UNMEASURED = Measured()
