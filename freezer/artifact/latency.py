"""Figures of latency, drift, load time and memory, and whether they are a regression. Imports no
torch.

Fields with a default are missing in manifests of earlier releases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Literal

from freezer.codec import OMIT_DEFAULT, JsonView, frozen, stored_as
from freezer.spec import MARKS, Clock, Point, SamplingPolicy

PointVerdict = Literal["faster", "not slower", "slower", "unstable", "not measured"]


@frozen
class ColdStart:
    """Times and resident memory of a fresh process that opens and calls the artifact; memory in 1e6
    bytes.
    """

    import_torch_ms: float
    open_ms: float
    first_call_ms: float
    second_call_ms: float
    memory_before_mb: float
    memory_peak_mb: float

    @property
    def load_ms(self) -> float:
        """From opening to the first answer, in a process that has imported torch."""
        return self.open_ms + self.first_call_ms

    @property
    def memory_mb(self) -> float:
        """Peak resident memory that opening and calling adds."""
        return self.memory_peak_mb - self.memory_before_mb


@frozen
class PointFigures:
    """Latency of one payload at one thread count and point, in milliseconds.

    Attributes:
        payload: its path.
        eager_p50: median of eager; the percentiles are the payload's. None: too few samples.
        speedup, speedup_ci: over eager; None where the machine was too disturbed.
        verdict: `faster` or `slower` than eager if the whole interval is; `unstable` where the
            machine was too disturbed; None in manifests of earlier releases.
        clock: as in LatencyRecord.
    """

    num_threads: int = field(metadata=stored_as("threads"))
    point: Point
    payload: str
    eager_p50: float | None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    speedup: float | None
    speedup_ci: tuple[float, float] | None
    verdict: PointVerdict | None = field(default=None, metadata=OMIT_DEFAULT)
    clock: Clock = field(default="wall", metadata=OMIT_DEFAULT)

    @property
    def place(self) -> str:
        """Thread count and sizes, for people."""
        return place_text(self.num_threads, self.point)


def place_text(
    num_threads: int,
    point: Point,
) -> str:
    """Thread count and sizes, for people."""
    threads = f"{num_threads} thread{'s' if num_threads > 1 else ''}"
    return ", ".join([threads, *(f"{name} {size}" for name, size in point.items())])


def slower_places(points: Iterable[PointFigures]) -> tuple[PointFigures, ...]:
    """Figures of the payload that serves, where it is slower than eager."""
    serving: dict[str, PointFigures] = {}
    for item in points:
        serving.setdefault(item.place, item)  # the first of several payloads serves
    return tuple(item for item in serving.values() if item.verdict == "slower")


def slower_than_eager(points: Iterable[PointFigures]) -> str:
    """The places of `slower_places` with their speedups, for people; empty if there is none."""
    slower = slower_places(points)
    return "; ".join(f"{item.place} ({MARKS[item.clock]}{item.speedup:.2f})" for item in slower)


def num_items(point: Point) -> int:
    """Number of inferences in one call at a point: the size of the dim `batch`, or 1
    without one.
    """
    return point.get("batch", 1)


@frozen
class LatencyRecord:
    """Judged latency at the deciding thread count and point.

    Attributes:
        eager_ms, ms: percentiles of eager and of the artifact; None: too few samples.
        speedup, speedup_ci: over eager; None where the machine was too disturbed.
        clock: which samples decided: `wall` of undisturbed rounds, `cpu` time of all rounds, or
            `disturbed`: `wall` of all rounds.
        inherited: version whose judge measured this, with other weights of the same architecture.
        num_samples: by entrant.
        settled: whether sampling ended before its time limit.
        points: figures of every payload wherever it was timed, the deciding place first.
        device: how a GPU was timed.
    """

    point: Point
    num_threads: int | None = None
    eager_ms: Mapping[str, float | None] = field(default_factory=dict)
    ms: Mapping[str, float | None] = field(default_factory=dict)
    speedup: float | None = None
    speedup_ci: tuple[float, float] | None = None
    clock: Clock = field(default="wall", metadata=OMIT_DEFAULT)
    inherited: int | None = field(default=None, metadata=OMIT_DEFAULT)
    num_samples: Mapping[str, int] = field(default_factory=dict)
    num_dropped_rounds: int = 0
    settled: bool = True
    policy: SamplingPolicy | None = None
    cold_start: ColdStart | None = None
    points: tuple[PointFigures, ...] = ()
    device: JsonView = field(default_factory=dict, metadata=OMIT_DEFAULT)

    def speedup_with(self, num_threads: int) -> float | None:
        """Speedup over eager at the deciding point, with this thread count if it was timed, or else
        with the deciding one.

        The ratio of medians where the judge was too disturbed; None where they are missing too.
        """
        for cell in self.points:
            if (cell.num_threads, cell.point) == (num_threads, self.point) and cell.speedup:
                return cell.speedup
        eager, own = self.eager_ms.get("p50"), self.ms.get("p50")
        return self.speedup or (eager / own if eager and own else None)


ERROR_RATIO = "distance from float64, as a multiple of eager's own; 1 is as exact as eager"
"""What an error ratio is, for pages that show one."""


@frozen
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


@frozen
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


@frozen
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


MORE_DRIFT = 2.0
"""Growth of the error ratio, or of eager's own 1 if that is larger, that counts as drift."""


@frozen
class SpeedChange:
    """Speed of a new artifact as a multiple of the one before.

    Attributes:
        value: ratio of the speeds.
        low, high: bounds of its confidence interval.
        noise: relative change of `value` that two separate measurements may show; None if both were
            timed in the same rounds.
    """

    value: float
    low: float
    high: float
    noise: float | None = None

    @property
    def slower(self) -> bool:
        """Whether the new artifact is slower for certain."""
        below = self.noise is None or self.value < 1 - self.noise
        return self.high < 1.0 and below

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
        error_ratio_before: error ratio of the artifact before; None if it is unknown, or of a lower
            precision, with whose error none is compared.
        error_ratio: error ratio of the new artifact; None if it is unknown.
    """
    if speed is not None and speed.slower:
        return "slower"
    if error_ratio_before is None or error_ratio is None or (speed is not None and speed.faster):
        return None
    return "drifted" if error_ratio > MORE_DRIFT * max(error_ratio_before, 1.0) else None
