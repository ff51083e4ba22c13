"""Samples of latency, and what is computed from them: percentiles, and the speedup of a candidate
over eager with its confidence interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from itertools import chain

import torch
from torch import Tensor

from freezer.artifact import SpeedChange
from freezer.codec import frozen
from freezer.runtime.input_sets import Draws
from freezer.runtime.torch_settings import threads
from freezer.spec import MARKS, Clock, SamplingPolicy, Timing
from freezer.timing.intervals import of_means, of_ranks, ratio_interval

MIN_SAMPLES: Mapping[str, int] = {"p50": 11, "p90": 64, "p95": 130, "p99": 662, "p99.9": 6636}

DIFFERENCE = 0.028
"""Usual standard deviation of the difference of a speedup in two processes, relative: each differs
from the mean of many by 2%.
"""

Blocks = Sequence[Sequence[float]]
"""Latencies of an entrant by round."""


@frozen
class Sampling:
    """Raw samples of all entrants.

    Attributes:
        samples_ms: latency of each call in milliseconds, by entrant and kept round. A stopped
            entrant has the first rounds only.
        num_dropped: disturbed rounds.
        settled: whether sampling stopped because the means were stable, not at the time limit.
        stable: whether there were enough rounds to measure speed.
        clock: name of the clock that measured the samples; `cpu` and `disturbed` include the
            disturbed rounds.
        disturbance: the processes that used the CPUs, if rounds were dropped.
        estimates_ms: median of the medians of all rounds by the clock, of each entrant.
        device: clocks, temperature, throttling and shared rounds of a GPU; None for a CPU.
    """

    samples_ms: Mapping[str, Sequence[Sequence[float]]]
    num_dropped: int
    settled: bool
    stable: bool
    clock: Clock = "wall"
    disturbance: str = ""
    estimates_ms: Mapping[str, float] = field(default_factory=dict)
    device: Mapping[str, object] | None = None

    @property
    def num_undisturbed(self) -> int:
        """Number of undisturbed rounds."""
        return self._num_rounds - (0 if self.clock == "wall" else self.num_dropped)

    @property
    def _num_rounds(self) -> int:
        return len(next(iter(self.samples_ms.values())))  # eager's, never stopped

    @property
    def problem(self) -> str:
        """Reason why the samples are too few for a result."""
        cause = f"; {self.disturbance}" if self.disturbance else " of a model as slow as this"
        return (
            f"only {self.num_undisturbed} undisturbed rounds ({self.num_dropped} dropped); too few"
            f" to measure speed{cause}"
        )

    def stopped(self, name: str) -> bool:
        """Whether an entrant was not timed to the end, as it was clearly slower than a rival
        (intervals.py).
        """
        return len(self.samples_ms[name]) < self._num_rounds

    def mean_ms(self, name: str) -> float:
        """Mean latency of an entrant; every round counts once."""
        return statistics.fmean(map(statistics.fmean, self.samples_ms[name]))

    def pooled(self, name: str) -> list[float]:
        """All kept samples of an entrant, in milliseconds."""
        return list(chain.from_iterable(self.samples_ms[name]))

    def percentiles(self, name: str, policy: SamplingPolicy) -> dict[str, float | None]:
        """Percentiles of an entrant in milliseconds; None with too few samples."""
        pooled = sorted(self.pooled(name))
        return {key: _percentile(pooled, key) for key in policy.percentiles}

    def deciles(self, name: str) -> tuple[float, ...]:
        """The minimum, the nine deciles and the maximum of an entrant's samples, in milliseconds;
        none with under two samples.
        """
        pooled = self.pooled(name)
        if len(pooled) < 2:
            return ()
        inner = statistics.quantiles(
            pooled,
            n=10,
            method="inclusive",
        )
        values = (min(pooled), *inner, max(pooled))
        return tuple(float(f"{value:.4g}") for value in values)


@frozen
class Speedup(SpeedChange):
    """Ratio of a figure of the blocks, eager's over the candidate's, and its confidence interval;
    see `speedup`.
    """

    clock: Clock = "wall"

    def __str__(self) -> str:
        return f"{MARKS[self.clock]}{self.value:.2f}"

    @property
    def least(self) -> str:
        """The lower bound in words."""
        return "no bound" if self.clock == "disturbed" else f"at least {self.low:.2f}"


def speedup(
    sampling: Sampling,
    candidate: str,
    *,
    eager: str,
    num_candidates: int,
    policy: SamplingPolicy,
    timing: Timing = "p50",
) -> Speedup:
    """Speedup over eager, with a 95% confidence interval over the rounds with both.

    Every round counts once. In the pooled samples a fast round counts more, as its blocks have more
    calls: their ratio may be outside the interval if the machine changes its speed.

    Args:
        sampling: samples of both.
        candidate, eager: names of entrants.
        num_candidates: number of competing candidates; the interval is widened to hold for all of
            them at once (Bonferroni).
        policy: seed, and number of resamples of 95th percentiles.
        timing: the figure to compare: the blocks' medians, by rank; for throughput their means; or
            the 95th percentile of all calls, with an interval by paired bootstrap.
    """
    num_rounds = min(len(sampling.samples_ms[name]) for name in (candidate, eager))
    theirs = sampling.samples_ms[candidate][:num_rounds]  # one may have been stopped
    eagers = sampling.samples_ms[eager][:num_rounds]
    tail = 0.025 / max(num_candidates, 1)
    if timing == "p95":
        value, low, high = _p95_interval(eagers, theirs, tail, policy)
    else:
        with threads(1):  # a second one may wait for a busy CPU
            value, low, high = ratio_interval(
                _figures(eagers, timing),
                _figures(theirs, timing),
                of_means if timing == "throughput" else of_ranks,
                tail=tail,
                seed=policy.seed,
            )
    return Speedup(value=float(value), low=float(low), high=float(high), clock=sampling.clock)


def over_processes(first: Speedup, second: Speedup) -> Speedup:
    """Combine the speedups in two processes: the geometric means of values and bounds, widened by
    the 95% interval of the mean of two processes.

    A process keeps its memory layout and hash seeds, so all its rounds share an error, which no
    number of rounds shows. The standard deviation between processes is the difference of the two,
    or DIFFERENCE if that is larger, over the square root of 2: two processes are often alike by
    chance, and the union of their intervals would contain the truth only if their errors have
    different signs.
    """
    difference = abs(math.log(first.value / second.value))
    between = math.exp(max(DIFFERENCE, difference) * 1.96 / 2)
    return Speedup(
        value=math.sqrt(first.value * second.value),
        low=math.sqrt(first.low * second.low) / between,
        high=math.sqrt(first.high * second.high) * between,
        clock=first.clock,
    )


def _figures(blocks: Blocks, timing: Timing) -> Tensor:
    """The mean or the median of each block."""
    of: Callable[[Sequence[float]], float] = statistics.median
    if timing == "throughput":
        of = statistics.fmean
    return torch.tensor(list(map(of, blocks)), dtype=torch.float64)


def _p95_interval(
    eagers: Blocks,
    theirs: Blocks,
    tail: float,
    policy: SamplingPolicy,
) -> tuple[Tensor, Tensor, Tensor]:
    """The ratio of 95th percentiles, and its quantiles over resampled rounds."""
    num_rounds = len(eagers)
    picks = Draws(policy.seed).integers(0, num_rounds, (policy.num_bootstrap, num_rounds))
    ratios = _p95(eagers, picks) / _p95(theirs, picks)
    low, high = torch.quantile(ratios, torch.tensor([tail, 1 - tail], dtype=torch.float64))
    each = torch.arange(num_rounds)[None]
    value = (_p95(eagers, each) / _p95(theirs, each)).squeeze()
    return value, torch.minimum(low, value), torch.maximum(high, value)


def _p95(blocks: Blocks, picks: Tensor) -> Tensor:
    """The 95th percentile of the calls of each row's blocks, where all blocks weigh the same."""
    sizes = torch.tensor([len(block) for block in blocks])
    pooled = list(chain.from_iterable(blocks))
    calls, order = torch.tensor(pooled, dtype=torch.float64).sort()
    block_of = torch.arange(len(blocks)).repeat_interleave(sizes)[order]
    ranks = []
    for row in picks:
        weights = torch.bincount(row, minlength=len(blocks)) / sizes.double()
        reached = weights[block_of].cumsum(0)
        ranks.append(torch.searchsorted(reached, 0.95 * len(row) - 1e-9))
    return calls[torch.stack(ranks).clamp(max=len(calls) - 1)]


def _percentile(ordered: Sequence[float], key: str) -> float | None:
    """Nearest-rank percentile of ordered samples, the median for p50; None with too few samples."""
    if len(ordered) < MIN_SAMPLES[key]:
        return None
    if key == "p50":
        return statistics.median(ordered)
    share = float(key.removeprefix("p")) / 100
    rank = math.ceil(round(share * len(ordered), 6))
    return ordered[rank - 1]
