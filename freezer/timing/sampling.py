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
from typing import NamedTuple

from freezer.spec import Clock, Objective, SamplingPolicy
from freezer.timing.halving import Halving, Rivals, Round
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

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
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
        device: clocks, temperature, throttling and shared rounds of a GPU; None for a CPU.
    """

    samples_ms: Mapping[str, Sequence[Sequence[float]]]
    num_dropped: int
    settled: bool
    stable: bool
    clock: Clock = "wall"
    disturbance: str = ""
    device: Mapping[str, object] | None = None

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
        if self.disturbance:
            return f"{why}; {self.disturbance}"
        return f"{why} of a model as slow as this"

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
    entrants: Mapping[str, Sequence[Call]],
    policy: SamplingPolicy,
    resets: Mapping[str, Call] | None = None,
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
    rounds = _Rounds(entrants, policy, resets or {}, meter or CpuMeter(policy), rivals or {})
    for name, calls in entrants.items():
        rounds.warm_up(name, calls)
    started = time.monotonic()
    while rounds.go_on(time.monotonic() - started):
        rounds.add()
    return rounds.sampling()


class _Rounds:
    """The rounds of one sampling; see `sample` for the arguments."""

    def __init__(
        self,
        entrants: Mapping[str, Sequence[Call]],
        policy: SamplingPolicy,
        resets: Mapping[str, Call],
        meter: CpuMeter,
        rivals: Rivals,
    ) -> None:
        self._policy, self._resets, self._meter = policy, resets, meter
        self._calls = {name: itertools.cycle(calls) for name, calls in entrants.items()}
        self._order = list(entrants)
        self._shuffle = random.Random(policy.seed)
        among = {name: set(rivals[name]) & set(entrants) for name in rivals if name in entrants}
        self._halving = Halving(among)
        self._tried: list[dict[str, _Block]] = []
        self._undisturbed: list[Round] = []
        self._settled = False

    def warm_up(self, name: str, calls: Sequence[Call]) -> None:
        """Call an entrant until two halves of the last calls agree within 10%."""
        taken: list[float] = []
        deadline = time.monotonic() + self._policy.warmup_s
        while len(taken) < 3 or time.monotonic() < deadline:
            if name in self._resets and len(taken) % WARM_UP_BLOCK == 0:
                self._resets[name]()
            taken.append(self._meter.timed_ms(calls[len(taken) % len(calls)]))
            if len(taken) >= 20 and len(taken) % 10 == 0:
                first, second = statistics.median(taken[-20:-10]), statistics.median(taken[-10:])
                if abs(first - second) <= 0.1 * second and sum(taken) >= self._policy.block_ms:
                    break

    def go_on(self, passed_s: float) -> bool:
        """Whether to sample further: until the means are stable or the time limit, and beyond it
        for enough undisturbed rounds and calls.
        """
        if not self._tried:
            return True
        if self._settled:
            return False
        policy, factor = self._policy, SLOW_OVERTIME
        if _enough(self._undisturbed, policy):
            factor = 1
        elif len(self._undisturbed) < policy.min_rounds <= len(self._tried) / 2:
            factor = OVERTIME
        return passed_s <= policy.time_limit_s * factor

    def add(self) -> None:
        """Run rounds that are long enough to be checked for disturbance together."""
        together: list[dict[str, _Block]] = []
        began = time.monotonic()
        self._meter.begin()
        while not together or time.monotonic() - began < TELLING_S:
            together.append(self._round())
        self._tried += together
        if not self._meter.disturbed(len(together)):
            self._undisturbed += _by_clock("wall", together)
            beaten = self._halving.beaten(self._undisturbed)
            self._order = [name for name in self._order if name not in beaten]
        rounds, policy = self._undisturbed, self._policy
        self._settled = (
            len(rounds) >= max(4, 2 * policy.min_rounds)
            and _has_samples(rounds, max(MIN_SAMPLES[key] for key in policy.percentiles))
            and _steady(rounds)
        )

    def _round(self) -> dict[str, _Block]:
        """Time one block of each entrant, in a new random order."""
        self._shuffle.shuffle(self._order)
        blocks: dict[str, _Block] = {}
        for name in self._order:
            if name in self._resets:
                self._resets[name]()
            blocks[name] = _block(self._calls[name], self._policy.block_ms, self._meter)
        return {name: blocks[name] for name in self._calls if name in blocks}

    def sampling(self) -> Sampling:
        """The undisturbed rounds; if they are too few, all rounds by CPU time if that is valid, or
        if noise is accepted.
        """
        rounds, meter, policy = self._undisturbed, self._meter, self._policy
        num_dropped, stable = len(self._tried) - len(rounds), _enough(rounds, policy)
        clock: Clock = "wall"
        by_wall, by_cpu = _by_clock("wall", self._tried), _by_clock("cpu", self._tried)
        if not stable and _enough(by_wall, policy):
            if meter.single_threaded() and _steady(by_cpu):
                clock, stable, rounds = "cpu", True, by_cpu
            elif policy.accept_noise:
                clock, stable, rounds = "disturbed", True, by_wall
        disturbance = meter.disturbance() if num_dropped else ""
        if disturbance and (not stable or clock != "wall"):
            num_tried = len(self._tried)
            logger.warning(
                "%d of %d rounds were disturbed; %s", num_dropped, num_tried, disturbance
            )
        samples_ms: dict[str, list[Sequence[float]]] = {}
        for name in self._calls:
            samples_ms[name] = [blocks[name] for blocks in rounds if name in blocks]
        return Sampling(
            samples_ms=samples_ms,
            num_dropped=num_dropped,
            settled=self._settled,
            stable=stable,
            clock=clock,
            disturbance=disturbance,
            device=meter.facts(),
        )


def _block(calls: Iterator[Call], block_ms: float, meter: CpuMeter) -> _Block:
    """Times of one block of calls."""
    block = _Block([], [])
    while block_ms > 0 and len(block.wall) < MOST_CALLS:
        used_s = time.thread_time()
        block.wall.append(meter.timed_ms(next(calls)))
        block.cpu.append((time.thread_time() - used_s) * 1e3)
        block_ms -= block.wall[-1]
    return block


def _by_clock(clock: Clock, rounds: Sequence[Mapping[str, _Block]]) -> list[Round]:
    """The times of rounds by one clock."""
    times: list[Round] = []
    for blocks in rounds:
        if clock == "cpu":
            times.append({name: block.cpu for name, block in blocks.items()})
        else:
            times.append({name: block.wall for name, block in blocks.items()})
    return times


def _enough(rounds: Sequence[Round], policy: SamplingPolicy) -> bool:
    """Whether the rounds are enough for a result."""
    if len(rounds) < policy.min_rounds:
        return False
    return policy.min_samples == 0 or _has_samples(rounds, policy.min_samples)


def _has_samples(rounds: Sequence[Round], needed: int) -> bool:
    """Whether every entrant that was not stopped has enough samples."""
    return all(sum(len(blocks[name]) for blocks in rounds) >= needed for name in rounds[-1])


def _steady(rounds: Sequence[Round]) -> bool:
    """Whether the means of the last 3 windows are within 10% of their mean, for every entrant that
    was not stopped.
    """
    window, num_rounds = max(1, len(rounds) // 4), len(rounds)
    for name in rounds[-1]:
        means = []
        for index in range(3):
            end = num_rounds - index * window
            blocks = [blocks[name] for blocks in rounds[end - window : end]]
            means.append(statistics.fmean(itertools.chain.from_iterable(blocks)))
        overall = statistics.fmean(means)
        if any(abs(mean - overall) > 0.1 * overall for mean in means):
            return False
    return True


def _percentile(ordered: Sequence[float], key: str) -> float | None:
    """Nearest-rank percentile of ordered samples, the median for p50; None with too few samples."""
    if len(ordered) < MIN_SAMPLES[key]:
        return None
    if key == "p50":
        return statistics.median(ordered)
    rank = math.ceil(round(float(key.removeprefix("p")) / 100 * len(ordered), 6))
    return ordered[rank - 1]
