"""One outcome in a flat, typed row, which tables, pages and descriptions show."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from pipeline.records.outcome import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The figures of one outcome; None where nothing was measured.

    Attributes:
        error_ratio, max_abs_err, margin: as in `MeasuredDrift`.
        size_mb: size of the payloads of the recipe, in 1e6 bytes; None if it was not built.
        code: error code, or type of the failure.
        reason: one sentence for people, without its code.
    """

    model: str
    device_class: str
    verdict: str
    cached: bool
    recipe: str | None
    speedup: float | None
    speedup_ci_low: float | None
    speedup_ci_high: float | None
    eager_p50_ms: float | None
    p50_ms: float | None
    error_ratio: float | None
    max_abs_err: float | None
    margin: float | None
    size_mb: float | None
    num_threads: int
    version: int | None
    artifact: str | None
    build_s: float
    judge_s: float
    code: str | None
    reason: str | None
    failed: bool

    @classmethod
    def of(cls, outcome: Outcome) -> Row:
        """Return the row of an outcome."""
        measured, report = outcome.figures, outcome.report
        low, high = measured.speedup_ci or (None, None)
        return cls(
            model=outcome.model,
            device_class=outcome.device_class,
            verdict=outcome.verdict,
            cached=outcome.cached,
            recipe=outcome.recipe,
            speedup=measured.speedup,
            speedup_ci_low=low,
            speedup_ci_high=high,
            eager_p50_ms=measured.latency_ms.eager_p50,
            p50_ms=measured.latency_ms.p50,
            error_ratio=measured.drift.error_ratio,
            max_abs_err=measured.drift.max_abs_err,
            margin=measured.drift.margin,
            size_mb=report.size_bytes / 1e6 if report and report.size_bytes else None,
            num_threads=outcome.num_threads,
            version=outcome.version,
            artifact=outcome.artifact,
            build_s=outcome.build_s,
            judge_s=outcome.judge_s,
            code=outcome.code or outcome.failure_kind,
            reason=outcome.reason,
            failed=outcome.failed,
        )

    @property
    def speedup_text(self) -> str:
        """The speedup with its interval, like `1.84x (1.79-1.90)`; empty if it was not measured."""
        return speedup_text(self.speedup, self.speedup_ci_low, self.speedup_ci_high)


def speedup_text(value: float | None, low: float | None, high: float | None) -> str:
    """Return a speedup with its interval, like `1.84x (1.79-1.90)`; empty if it was not
    measured.
    """
    if value is None:
        return ""
    interval = "" if low is None or high is None else f" ({low:.2f}-{high:.2f})"
    return f"{value:.2f}x{interval}"


def rounded(value: float | None) -> str:
    """Return a figure with three digits; empty if it was not measured."""
    return "" if value is None else f"{value:.3g}"


def iso(seconds: float, *, timespec: Literal["seconds", "milliseconds"] = "seconds") -> str:
    """Format seconds since the epoch as ISO 8601, UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec=timespec)
