"""Sample latency: all entrants run interleaved in one process, in a new random order every round.

Warm up until stable. Sample in rounds of one block per entrant. Drop and count disturbed rounds. Stop when the means of the last 3
windows are within 10% of their mean and every percentile has enough samples, or at the time limit. Pool the raw samples. A
percentile with too few samples is None (MLPerf LoadGen's early stopping at 99% confidence).

A block has a duration, not a number of calls: a number found while the machine was busier or quieter would make rounds last a
millisecond or many seconds. Rounds too short for the kernel's clock ticks are checked for disturbance together, every TELLING_S.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from freezer.limits import SamplingPolicy
from freezer.timing.meters import CpuMeter

WARM_UP_BLOCK = 100
"""Warm-up calls between resets of a state."""

MOST_CALLS = 1000
"""Maximum calls of a block."""

TELLING_S = 0.1
"""Least duration of rounds that are checked for disturbance: CPU times have ticks of 10 ms, of which two are ignored."""

MIN_SAMPLES: Mapping[str, int] = {"p50": 11, "p90": 64, "p95": 130, "p99": 662, "p99.9": 6636}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Raw samples of all entrants.

    Attributes:
        samples_ms: latency of each call in milliseconds, by entrant and kept round.
        num_dropped: disturbed rounds.
        settled: whether sampling stopped because the means were stable, not at the time limit.
        stable: whether there were enough undisturbed rounds.
        device: clocks, temperature, throttling and shared rounds of a GPU; None for a CPU.
    """

    samples_ms: Mapping[str, Sequence[Sequence[float]]]
    num_dropped: int
    settled: bool
    stable: bool
    device: Mapping[str, Any] | None = None

    def pooled(self, name: str) -> list[float]:
        """All kept samples of an entrant, in milliseconds."""
        return [sample for block in self.samples_ms[name] for sample in block]

    def percentiles(self, name: str, policy: SamplingPolicy) -> dict[str, float | None]:
        """Percentiles of an entrant in milliseconds; None with too few samples."""
        pooled = sorted(self.pooled(name))
        return {key: _percentile(pooled, key) for key in policy.percentiles}


@dataclass(frozen=True, kw_only=True, slots=True)
class Speedup:
    """Ratio of the medians of all blocks' medians, eager's over the candidate's, and its confidence interval."""

    value: float
    low: float
    high: float


def sample(
    entrants: Mapping[str, Sequence[Callable[[], Any]]],
    policy: SamplingPolicy,
    resets: Mapping[str, Callable[[], object]] | None = None,
    meter: CpuMeter | None = None,
) -> Sampling:
    """Time all entrants side by side.

    Args:
        entrants: calls by name, with distinct inputs that rotate, so that caches do not help.
        policy: durations and counts.
        resets: resets of an entrant's state by name, untimed, before its warm-up and each block. A growing state would slow down
            later calls, most of all for the fastest entrant, which makes the most calls.
        meter: times calls and detects disturbance; a CpuMeter by default.
    """
    resets, meter = resets or {}, meter or CpuMeter(policy)
    for name, calls in entrants.items():
        _warm_up(calls, policy, resets.get(name), meter)
    shuffle = random.Random(policy.seed)
    order, rotating = list(entrants), {name: itertools.cycle(calls) for name, calls in entrants.items()}
    rounds: list[dict[str, list[float]]] = []
    num_dropped, settled = 0, False
    started = time.monotonic()
    while not settled:
        passed_s = time.monotonic() - started
        if passed_s > 2 * policy.time_limit_s or (passed_s > policy.time_limit_s and len(rounds) >= policy.min_rounds):
            break
        together: list[dict[str, list[float]]] = []
        began = time.monotonic()
        meter.begin()
        while not together or time.monotonic() - began < TELLING_S:
            shuffle.shuffle(order)
            blocks: dict[str, list[float]] = {}
            for name in order:
                if name in resets:
                    resets[name]()
                blocks[name] = _block(rotating[name], policy.block_ms, meter)
            together.append(blocks)
        if meter.disturbed(len(together)):
            num_dropped += len(together)
        else:
            rounds += together
        settled = len(rounds) >= 4 * policy.min_rounds and _settled(rounds, policy)
    return Sampling(
        samples_ms={name: [blocks[name] for blocks in rounds] for name in entrants},
        num_dropped=num_dropped,
        settled=settled,
        stable=len(rounds) >= policy.min_rounds,
        device=meter.facts(),
    )


def speedup(sampling: Sampling, candidate: str, *, eager: str, num_candidates: int, policy: SamplingPolicy) -> Speedup:
    """Speedup over eager, with a 95% confidence interval by paired bootstrap over rounds.

    Every round counts once. In the pooled samples a fast round counts more, as its blocks have more calls: their ratio may be
    outside the interval if the machine changes its speed.

    Args:
        sampling: of both.
        candidate, eager: names of entrants.
        num_candidates: competing candidates; the interval is widened to hold for all of them at once (Bonferroni).
        policy: number of resamples, and seed.
    """
    theirs, eagers = (
        torch.tensor([statistics.median(block) for block in sampling.samples_ms[name]], dtype=torch.float64)
        for name in (candidate, eager)
    )
    generator = torch.Generator().manual_seed(policy.seed)
    picks = torch.randint(0, len(theirs), (policy.num_bootstrap, len(theirs)), generator=generator)
    ratios = eagers[picks].quantile(0.5, dim=1) / theirs[picks].quantile(0.5, dim=1)
    tail = 0.025 / max(num_candidates, 1)
    low, high = torch.quantile(ratios, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    value = float(eagers.quantile(0.5) / theirs.quantile(0.5))
    return Speedup(value=value, low=min(low, value), high=max(high, value))


def _warm_up(
    calls: Sequence[Callable[[], Any]], policy: SamplingPolicy, reset: Callable[[], object] | None, meter: CpuMeter
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


def _block(calls: Iterator[Callable[[], Any]], block_ms: float, meter: CpuMeter) -> list[float]:
    """Latencies of one block of calls."""
    taken: list[float] = []
    while block_ms > 0 and len(taken) < MOST_CALLS:
        taken.append(meter.timed_ms(next(calls)))
        block_ms -= taken[-1]
    return taken


def _settled(rounds: Sequence[Mapping[str, Sequence[float]]], policy: SamplingPolicy) -> bool:
    """Whether every entrant has enough samples, and the means of its last 3 windows are within 10% of their mean."""
    needed = max(MIN_SAMPLES[key] for key in policy.percentiles)
    window = max(1, len(rounds) // 4)
    for name in rounds[0]:
        if sum(len(blocks[name]) for blocks in rounds) < needed:
            return False
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
