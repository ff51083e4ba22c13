"""Sample latency: all entrants run interleaved in one process, in a new random order every round.

Warm up until stable. Sample in rounds of one block per entrant. Drop and count disturbed rounds.
Stop when the means of the last 3 windows are within 10% of their mean and every percentile has
enough samples, or at the time limit. Pool the raw samples. A percentile with too few samples is
None (MLPerf LoadGen's early stopping at 99% confidence).

Entrants that are clearly slower than a rival are not timed to the end (halving.py).

With too few undisturbed rounds, the CPU time of all rounds decides if the calls used one thread and
its means are as close.

A block has a duration, not a number of calls: a number found while the machine was busier or
quieter would make rounds last a millisecond or many seconds. Rounds too short for the kernel's
clock ticks are checked for disturbance together, every TELLING_S.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from freezer.spec import Clock, Objective, SamplingPolicy, Timing
from freezer.timing.halving import Halving, Rivals
from freezer.timing.meters import CpuMeter

logger = logging.getLogger("coldpress")

WARM_UP_BLOCK = 100
"""Warm-up calls between resets of a state."""

MOST_CALLS = 1000
"""Maximum calls of a block."""

TELLING_S = 0.1
"""Least duration of rounds that are checked for disturbance: CPU times have ticks of 10 ms, of
which two are ignored.
"""

OVERTIME = 2
"""Multiple of the time limit after which a disturbed machine is given up."""

SLOW_OVERTIME = 20
"""The same for rounds so long that fewer than twice the minimum were tried, or that have too few
calls.
"""

MIN_SAMPLES: Mapping[str, int] = {"p50": 11, "p90": 64, "p95": 130, "p99": 662, "p99.9": 6636}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Raw samples of all entrants.

    Attributes:
        samples_ms: latency of each call in milliseconds, by entrant and kept round. A stopped
            entrant has the first rounds only.
        num_dropped: disturbed rounds.
        settled: whether sampling stopped because the means were stable, not at the time limit.
        stable: whether there were enough rounds to measure speed.
        clock: that the samples were taken by; `cpu` and `disturbed` include the disturbed rounds.
        disturbance: what used the CPUs, if rounds were dropped.
        device: clocks, temperature, throttling and shared rounds of a GPU; None for a CPU.
    """

    samples_ms: Mapping[str, Sequence[Sequence[float]]]
    num_dropped: int
    settled: bool
    stable: bool
    clock: Clock = "wall"
    disturbance: str = ""
    device: Mapping[str, Any] | None = None

    @property
    def num_undisturbed(self) -> int:
        """Number of undisturbed rounds."""
        return self._num_rounds - (0 if self.clock == "wall" else self.num_dropped)

    @property
    def _num_rounds(self) -> int:
        return max(map(len, self.samples_ms.values()))

    @property
    def problem(self) -> str:
        """Reason why the samples are too few for a result."""
        why = (
            f"only {self.num_undisturbed} undisturbed rounds ({self.num_dropped} dropped); too few"
            " to measure speed"
        )
        return (
            f"{why}; {self.disturbance}"
            if self.disturbance
            else f"{why} of a model as slow as this"
        )

    def stopped(self, name: str) -> bool:
        """Whether an entrant was not timed to the end, as it was clearly slower than a rival
        (halving.py).
        """
        return len(self.samples_ms[name]) < self._num_rounds

    def mean_ms(self, name: str) -> float:
        """Mean latency of an entrant; every round counts once."""
        return statistics.fmean(statistics.fmean(block) for block in self.samples_ms[name])

    def pooled(self, name: str) -> list[float]:
        """All kept samples of an entrant, in milliseconds."""
        return [sample for block in self.samples_ms[name] for sample in block]

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
        inner = statistics.quantiles(pooled, n=10, method="inclusive")
        return tuple(float(f"{value:.4g}") for value in (min(pooled), *inner, max(pooled)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Speedup:
    """Ratio of a figure of all blocks, eager's over the candidate's, and its confidence interval;
    see `speedup`.
    """

    value: float
    low: float
    high: float


class _Block(NamedTuple):
    """Latencies of consecutive calls, and CPU times of their thread, in milliseconds."""

    wall: list[float]
    cpu: list[float]


def policy_for(objective: Objective, policy: SamplingPolicy) -> SamplingPolicy:
    """The policy that samples enough calls for an objective."""
    if objective != "p95":
        return policy
    percentiles = sorted({*policy.percentiles, objective}, key=lambda key: float(key[1:]))
    return replace(policy, percentiles=tuple(percentiles), min_samples=MIN_SAMPLES[objective])


def sample(
    entrants: Mapping[str, Sequence[Callable[[], Any]]],
    policy: SamplingPolicy,
    resets: Mapping[str, Callable[[], object]] | None = None,
    meter: CpuMeter | None = None,
    rivals: Rivals | None = None,
) -> Sampling:
    """Time all entrants side by side.

    Args:
        entrants: calls by name, with distinct inputs that rotate, so that caches do not help.
        policy: durations and counts.
        resets: resets of an entrant's state by name, untimed, before its warm-up and each block. A
            growing state would slow down later calls, most of all for the fastest entrant, which
            makes the most calls.
        meter: times calls and detects disturbance; a CpuMeter by default.
        rivals: see halving.py; by default all entrants are timed to the end.
    """
    resets, meter = resets or {}, meter or CpuMeter(policy)
    halving = Halving(
        {
            name: set(others) & set(entrants)
            for name, others in (rivals or {}).items()
            if name in entrants
        }
    )
    for name, calls in entrants.items():
        _warm_up(calls, policy, resets.get(name), meter)
    shuffle, rotating = (
        random.Random(policy.seed),
        {name: itertools.cycle(calls) for name, calls in entrants.items()},
    )
    order = list(entrants)
    tried: list[dict[str, _Block]] = []
    rounds: list[dict[str, list[float]]] = []  # undisturbed
    settled, started = False, time.monotonic()
    while not tried or (
        not settled and _goes_on(time.monotonic() - started, rounds, len(tried), policy)
    ):
        together: list[dict[str, _Block]] = []
        began = time.monotonic()
        meter.begin()
        while not together or time.monotonic() - began < TELLING_S:
            shuffle.shuffle(order)
            blocks: dict[str, _Block] = {}
            for name in order:
                if name in resets:
                    resets[name]()
                blocks[name] = _block(rotating[name], policy.block_ms, meter)
            together.append({name: blocks[name] for name in entrants if name in blocks})
        tried += together
        if not meter.disturbed(len(together)):
            rounds += _times("wall", together)
            beaten = halving.beaten(rounds)
            order = [name for name in order if name not in beaten]
        settled = (
            len(rounds) >= max(4, 2 * policy.min_rounds)
            and _has_samples(rounds, policy)
            and _steady(rounds)
        )
    return _sampling(tried, rounds, policy, meter, settled=settled)


def _sampling(
    tried: Sequence[Mapping[str, _Block]],
    rounds: Sequence[Mapping[str, Sequence[float]]],
    policy: SamplingPolicy,
    meter: CpuMeter,
    *,
    settled: bool,
) -> Sampling:
    """Return the undisturbed rounds; if they are too few, all rounds by CPU time if that is valid,
    or if noise is accepted.
    """
    num_dropped, stable = len(tried) - len(rounds), _enough(rounds, policy)
    by_wall = _times("wall", tried)
    clock: Clock = "wall"
    if (
        not stable
        and _enough(by_wall, policy)
        and meter.single_threaded()
        and _steady(by_cpu := _times("cpu", tried))
    ):
        clock, stable, rounds = "cpu", True, by_cpu
    elif not stable and policy.accept_noise and _enough(by_wall, policy):
        clock, stable, rounds = "disturbed", True, by_wall
    disturbance = meter.disturbance() if num_dropped else ""
    if disturbance and (not stable or clock != "wall"):
        logger.warning("%d of %d rounds were disturbed; %s", num_dropped, len(tried), disturbance)
    return Sampling(
        samples_ms={
            name: [blocks[name] for blocks in rounds if name in blocks] for name in tried[0]
        },
        num_dropped=num_dropped,
        settled=settled,
        stable=stable,
        clock=clock,
        disturbance=disturbance,
        device=meter.facts(),
    )


def _goes_on(
    passed_s: float,
    kept: Sequence[Mapping[str, Sequence[float]]],
    num_tried: int,
    policy: SamplingPolicy,
) -> bool:
    """Whether to sample further: until the time limit, and beyond it for enough undisturbed rounds
    and calls.
    """
    if len(kept) >= policy.min_rounds:
        return passed_s <= policy.time_limit_s * (1 if _enough(kept, policy) else SLOW_OVERTIME)
    return passed_s <= policy.time_limit_s * (
        OVERTIME if num_tried >= 2 * policy.min_rounds else SLOW_OVERTIME
    )


def speedup(
    sampling: Sampling,
    candidate: str,
    *,
    eager: str,
    num_candidates: int,
    policy: SamplingPolicy,
    timing: Timing = "p50",
) -> Speedup:
    """Speedup over eager, with a 95% confidence interval by paired bootstrap over rounds.

    Every round with both counts once. In the pooled samples a fast round counts more, as its blocks
    have more calls: their ratio may be outside the interval if the machine changes its speed.

    Args:
        sampling: of both.
        candidate, eager: names of entrants.
        num_candidates: competing candidates; the interval is widened to hold for all of them at
            once (Bonferroni).
        policy: number of resamples, and seed.
        timing: the figure to compare: the median of the blocks' medians, the 95th percentile of all
            calls, or, for throughput, the mean of the blocks' means.
    """
    pairs = list(
        zip(sampling.samples_ms[candidate], sampling.samples_ms[eager], strict=False)
    )  # one may have been stopped
    theirs, eagers = zip(*pairs, strict=True)
    generator = torch.Generator().manual_seed(policy.seed)
    picks = torch.randint(0, len(theirs), (policy.num_bootstrap, len(theirs)), generator=generator)
    ratios = _figures(eagers, picks, timing) / _figures(theirs, picks, timing)
    tail = 0.025 / max(num_candidates, 1)
    low, high = torch.quantile(ratios, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    each = torch.arange(len(theirs))[None]
    value = float(_figures(eagers, each, timing) / _figures(theirs, each, timing))
    return Speedup(value=value, low=min(low, value), high=max(high, value))


def _figures(blocks: Sequence[Sequence[float]], picks: Tensor, timing: Timing) -> Tensor:
    """A figure of blocks for each row of picks, [resamples, rounds]."""
    if timing == "p95":
        return _p95(blocks, picks)
    of_block = statistics.fmean if timing == "throughput" else statistics.median
    found = torch.tensor([of_block(block) for block in blocks], dtype=torch.float64)[picks]
    return found.mean(dim=1) if timing == "throughput" else found.quantile(0.5, dim=1)


def _p95(blocks: Sequence[Sequence[float]], picks: Tensor) -> Tensor:
    """The 95th percentile of the calls of each row's blocks, where all blocks weigh the same."""
    sizes = torch.tensor([len(block) for block in blocks])
    calls, order = torch.tensor(
        [ms for block in blocks for ms in block], dtype=torch.float64
    ).sort()
    block_of = torch.arange(len(blocks)).repeat_interleave(sizes)[order]
    found = []
    for row in picks:
        weights = torch.bincount(row, minlength=len(blocks)) / sizes.double()
        found.append(torch.searchsorted(weights[block_of].cumsum(0), 0.95 * len(row) - 1e-9))
    return calls[torch.stack(found).clamp(max=len(calls) - 1)]


def _warm_up(
    calls: Sequence[Callable[[], Any]],
    policy: SamplingPolicy,
    reset: Callable[[], object] | None,
    meter: CpuMeter,
) -> None:
    """Call until two halves of the last calls agree within 10%."""
    taken: list[float] = []
    deadline = time.monotonic() + policy.warmup_s
    while len(taken) < 3 or time.monotonic() < deadline:
        if reset is not None and len(taken) % WARM_UP_BLOCK == 0:
            reset()
        taken.append(meter.timed_ms(calls[len(taken) % len(calls)]))
        if len(taken) >= 20 and len(taken) % 10 == 0:
            first, second = statistics.median(taken[-20:-10]), statistics.median(taken[-10:])
            if abs(first - second) <= 0.1 * second and sum(taken) >= policy.block_ms:
                break


def _block(calls: Iterator[Callable[[], Any]], block_ms: float, meter: CpuMeter) -> _Block:
    """Times of one block of calls."""
    block = _Block([], [])
    while block_ms > 0 and len(block.wall) < MOST_CALLS:
        used_s = time.thread_time()
        block.wall.append(meter.timed_ms(next(calls)))
        block.cpu.append((time.thread_time() - used_s) * 1e3)
        block_ms -= block.wall[-1]
    return block


def _times(clock: Clock, rounds: Sequence[Mapping[str, _Block]]) -> list[dict[str, list[float]]]:
    """The times of rounds by one clock."""
    return [
        {name: block.cpu if clock == "cpu" else block.wall for name, block in blocks.items()}
        for blocks in rounds
    ]


def _enough(rounds: Sequence[Mapping[str, Sequence[float]]], policy: SamplingPolicy) -> bool:
    """Whether the rounds are enough for a result."""
    if len(rounds) < policy.min_rounds:
        return False
    return policy.min_samples == 0 or all(
        sum(len(blocks[name]) for blocks in rounds) >= policy.min_samples for name in rounds[-1]
    )


def _has_samples(rounds: Sequence[Mapping[str, Sequence[float]]], policy: SamplingPolicy) -> bool:
    """Whether every entrant that was not stopped has enough samples for all percentiles."""
    needed = max(MIN_SAMPLES[key] for key in policy.percentiles)
    return all(sum(len(blocks[name]) for blocks in rounds) >= needed for name in rounds[-1])


def _steady(rounds: Sequence[Mapping[str, Sequence[float]]]) -> bool:
    """Whether the means of the last 3 windows are within 10% of their mean, for every entrant that
    was not stopped.
    """
    window = max(1, len(rounds) // 4)
    for name in rounds[-1]:
        last = [rounds[len(rounds) - (i + 1) * window : len(rounds) - i * window] for i in range(3)]
        means = [statistics.fmean(s for blocks in part for s in blocks[name]) for part in last]
        overall = statistics.fmean(means)
        if any(abs(mean - overall) > 0.1 * overall for mean in means):
            return False
    return True


def _percentile(ordered: Sequence[float], key: str) -> float | None:
    """Nearest-rank percentile of ordered samples, the median for p50; None with too few samples."""
    if len(ordered) < MIN_SAMPLES[key]:
        return None
    rank = math.ceil(round(float(key.removeprefix("p")) / 100 * len(ordered), 6))
    return statistics.median(ordered) if key == "p50" else ordered[rank - 1]
