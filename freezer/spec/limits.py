"""Limits for candidates, and how a judge samples their latency. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from freezer.codec import OMIT_DEFAULT, frozen
from freezer.errors import expected_names

Objective = Literal["p50", "p95", "throughput", "size"]
"""What the published candidate is best in, of those that meet the limits
(docs/reference/contract.md).
"""

Timing = Literal["p50", "p95", "throughput"]
"""The objectives about steady latency: median, 95th percentile, mean."""

Clock = Literal["wall", "cpu", "disturbed", "inherited", "none"]
"""What measured latency: the clock in undisturbed rounds, the thread's CPU time in all rounds, the
clock in all rounds, or the judge of an earlier version with the same architecture. None does on an
emulated CPU.
"""

CLOCKS: dict[Clock, str] = {
    "wall": "",
    "cpu": "by CPU time",
    "disturbed": "by disturbed rounds",
    "inherited": "inherited from an earlier version",
    "none": "speed not measured",
}
"""The same in words; empty for the default."""

MARKS: dict[Clock, str] = {"wall": "", "cpu": "", "disturbed": "~", "inherited": "^", "none": ""}
"""The same before a figure: `~512.29` was measured in disturbed rounds, and is not a bound; `^1.84`
was measured with other weights.
"""


@frozen
class Limits:
    """Limits that an entry may set.

    Attributes:
        speedup_min: the lower confidence bound of the speedup must exceed it, also if the objective
            is another one.
        error_ratio_max: limit of the drift gate.
        timeout_s: longest wall time of a build or judge.
        memory_gb: most resident memory of a build or judge, in 1e9 bytes.
        latency_ms_max: highest median latency at the first point; with the objective `p95`, highest
            95th percentile.
        size_mb_max: largest total size of payloads, in 1e6 bytes.
        memory_mb_max: most resident memory that opening and calling adds to a fresh process, in 1e6
            bytes.
        nan: `keep` refuses what answers numbers where eager propagates NaN or Inf; `report` warns.
        allow_regression: publish what is slower, or drifts more, than the artifact that serves now.
    """

    speedup_min: float = 1.05
    error_ratio_max: float = 3.0
    timeout_s: float = 900.0
    memory_gb: float | None = None
    latency_ms_max: float | None = None
    size_mb_max: float | None = None
    memory_mb_max: float | None = None
    nan: Literal["report", "keep"] = field(default="report", metadata=OMIT_DEFAULT)
    allow_regression: bool = False


_WEEK_S = 7 * 86_400.0

LIMIT_BOUNDS: Mapping[str, float] = {
    "speedup_min": 1e6,
    "error_ratio_max": 1e9,
    "timeout_s": _WEEK_S,
    "memory_gb": 1e5,
    "latency_ms_max": 1e9,
    "size_mb_max": 1e9,
    "memory_mb_max": 1e9,
}
"""The limits that a catalog or a command may set, each with its greatest value; a limit must be
above 0.
"""


def limit_problem(name: str, value: object) -> str | None:
    """Why a catalog or a command cannot set a limit to a value; None if it can.

    The value None means the default.
    """
    if name == "nan":
        named = value in (None, "report", "keep")
        return None if named else f"got {str(value)[:80]!r}, expected 'report' or 'keep'"
    if name not in LIMIT_BOUNDS:
        return f"the limit is unknown; {expected_names(name, LIMIT_BOUNDS)}"
    most = LIMIT_BOUNDS[name]
    if value is None:
        return None
    if isinstance(value, int | float) and value is not True and 0 < value <= most:
        return None
    return f"got {str(value)[:80]!r}, expected a number above 0 and of at most {most:.7g}"


@frozen
class SamplingPolicy:
    """Sampling of a judge; part of its key, except `accept_noise`.

    Attributes:
        time_limit_s: longest sampling of one judge, without warm-up.
        warmup_s: longest warm-up of each entrant.
        block_ms: wall time of an entrant's block of calls in a round.
        percentiles: published ones.
        min_rounds, min_samples: undisturbed rounds, and calls of each entrant, that a result needs;
            slow models are sampled beyond the time limit for them.
        busy_limit: share of CPU time that other processes may use in a round.
        steal_limit: share of CPU time that the hypervisor may take in a round.
        num_bootstrap: resamples of the confidence interval of 95th percentiles.
        seed: for the order of blocks and the confidence intervals.
        accept_noise: with too few undisturbed rounds, publish what is fast enough by the lower
            bound over all rounds.
    """

    time_limit_s: float = 10.0
    warmup_s: float = 1.5
    block_ms: float = 60.0
    percentiles: tuple[str, ...] = ("p50", "p90", "p99")
    min_rounds: int = 10
    busy_limit: float = 0.25
    steal_limit: float = 0.10
    num_bootstrap: int = 1000
    seed: int = 0
    accept_noise: bool = field(default=False, metadata=OMIT_DEFAULT)
    min_samples: int = field(default=0, metadata=OMIT_DEFAULT)


def timing_of(objective: str) -> Timing:
    """The latency figure that an objective compares; the median by default.

    Records of earlier releases may name objectives that are gone.
    """
    if objective == "p95":
        return "p95"
    return "throughput" if objective == "throughput" else "p50"
