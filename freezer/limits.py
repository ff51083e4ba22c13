"""What a judge holds candidates to, and how it samples. Pure data; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What an entry may ask for.

    Attributes:
        speedup_min: the least that the lower confidence bound of the speedup must exceed.
        error_ratio_max: the drift gate.
        timeout_s: wall time of each build and judge.
        memory_gb: resident memory of each build and judge, in 1e9 bytes.
        latency_ms_max: the largest median latency at the first point.
        size_mb_max: the largest sum of payloads, in 1e6 bytes.
    """

    speedup_min: float = 1.05
    error_ratio_max: float = 3.0
    timeout_s: float = 900.0
    memory_gb: float | None = None
    latency_ms_max: float | None = None
    size_mb_max: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingPolicy:
    """How long and how often to sample; part of a judge's key.

    Attributes:
        time_limit_s: of sampling one judge, warm-up not counted.
        warmup_s: at most, for each entrant.
        block_ms: wall time of one entrant's block of calls in one round.
        percentiles: to publish.
        min_rounds: undisturbed rounds below which nothing can be told.
        busy_limit: share of the CPUs' time that others may use in a round.
        steal_limit: share of the CPUs' time that the hypervisor may take in a round.
        num_bootstrap: resamples of the confidence interval.
        seed: of the order of blocks and of the bootstrap.
    """

    time_limit_s: float = 10.0
    warmup_s: float = 1.5
    block_ms: float = 60.0
    percentiles: tuple[str, ...] = ("p50", "p90", "p99")
    min_rounds: int = 5
    busy_limit: float = 0.25
    steal_limit: float = 0.10
    num_bootstrap: int = 1000
    seed: int = 0
