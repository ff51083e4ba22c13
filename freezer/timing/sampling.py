"""Sample latency: all entrants run interleaved in one process, in a new random order every round.

Warm up until stable. Sample in rounds of one block per entrant. Drop and count disturbed rounds.
Stop when the means of the last 3 windows are within 10% of their mean and every percentile has
enough samples, or at the time limit. Pool the raw samples. A percentile with too few samples is
None (MLPerf LoadGen's early stopping at 99% confidence).

Entrants that are clearly slower than a rival are not timed to the end (intervals.py).

With too few undisturbed rounds, the CPU time of all rounds decides if the calls used one thread and
its means are as close.

A block has a duration, not a number of calls: a number found while the machine was busier or
quieter would make rounds last a millisecond or many seconds. Rounds too short for the kernel's
clock ticks are checked for disturbance together, every TELLING_S.
"""

from __future__ import annotations

import logging
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, cycle, islice
from typing import NamedTuple

from freezer.spec import Clock, Objective, SamplingPolicy
from freezer.timing.intervals import Halving, Rivals, Round
from freezer.timing.meters import CpuMeter
from freezer.timing.samples import MIN_SAMPLES, Sampling
from freezer.timing.sharing import alone

logger = logging.getLogger("coldpress")

FIRST_CALLS = 3
"""Calls before the warm-up: TorchScript compiles in the second, engines allocate in the first."""

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

Call = Callable[[], object]


class _Block(NamedTuple):
    """Latencies of consecutive calls, and CPU times of their thread, in milliseconds."""

    wall: list[float]
    cpu: list[float]


def policy_for(objective: Objective, policy: SamplingPolicy) -> SamplingPolicy:
    """The policy that samples enough calls for an objective."""
    if objective != "p95":
        return policy
    percentiles = sorted({*policy.percentiles, objective}, key=lambda key: float(key[1:]))
    return replace(
        policy,
        percentiles=tuple(percentiles),
        min_samples=MIN_SAMPLES[objective],
    )


def sample(
    entrants: Mapping[str, Sequence[Call]],
    policy: SamplingPolicy,
    resets: Mapping[str, Call] | None = None,
    meter: CpuMeter | None = None,
    rivals: Rivals | None = None,
) -> Sampling:
    """Time all entrants side by side, alone on the machine (sharing.py) from the warm-up on.

    Args:
        entrants: calls by name, with distinct inputs that rotate, so that caches do not help.
        policy: durations and counts.
        resets: called by name, untimed, before an entrant's warm-up and each block; they also
            reset its state. A growing state would slow down later calls, most of all for the
            fastest entrant, which makes the most calls.
        meter: times calls and detects disturbance; a CpuMeter by default.
        rivals: see intervals.py; by default all entrants are timed to the end.
    """
    rounds = _Rounds(entrants, policy, resets or {}, meter or CpuMeter(policy), rivals or {})
    for name, calls in entrants.items():
        rounds.first_calls(name, calls)
    with alone():
        for name in entrants:
            rounds.warm_up(name)
        started = time.monotonic()
        rounds.add()
        while time.monotonic() - started <= rounds.time_limit_s:
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
        self._policy = policy
        self._resets = resets
        self._meter = meter
        self._calls = {name: cycle(calls) for name, calls in entrants.items()}
        self._order = list(entrants)
        self._shuffle = random.Random(policy.seed)
        timed = set(entrants)
        self._halving = Halving({name: timed & set(rivals.get(name, ())) for name in timed})
        self._wall: list[Round] = []
        self._cpu: list[Round] = []
        self._undisturbed: list[Round] = []

    def first_calls(self, name: str, calls: Sequence[Call]) -> None:
        """Make the calls in which an entrant compiles or allocates."""
        if name in self._resets:
            self._resets[name]()
        for call in islice(cycle(calls), FIRST_CALLS):
            call()

    def warm_up(self, name: str) -> None:
        """Run blocks of an entrant until two in a row agree within 10%."""
        deadline = time.monotonic() + self._policy.warmup_s
        before = math.inf
        while time.monotonic() < deadline:
            median = statistics.median(self._block(name).wall)
            if abs(median - before) <= 0.1 * median:
                return
            before = median

    @property
    def time_limit_s(self) -> float:
        """How long to sample: not further once the means are stable, and beyond the limit of the
        policy for enough undisturbed rounds and calls.
        """
        policy = self._policy
        if self._is_settled():
            return 0.0
        if _enough(self._undisturbed, policy):
            return policy.time_limit_s
        if len(self._undisturbed) < policy.min_rounds <= len(self._wall) / 2:
            return policy.time_limit_s * OVERTIME
        return policy.time_limit_s * SLOW_OVERTIME

    def add(self) -> None:
        """Run rounds that are long enough to be checked for disturbance together."""
        num_before = len(self._wall)
        began = time.monotonic()
        self._meter.begin()
        while len(self._wall) == num_before or time.monotonic() - began < TELLING_S:
            self._add_round()
        together = self._wall[num_before:]
        if self._meter.disturbed(len(together)):
            return
        self._undisturbed += together
        beaten = self._halving.beaten(self._undisturbed)
        self._order = [name for name in self._order if name not in beaten]

    def _is_settled(self) -> bool:
        """Whether the means are stable and every percentile has enough samples."""
        rounds = self._undisturbed
        if len(rounds) < max(4, 2 * self._policy.min_rounds):
            return False
        needed = max(MIN_SAMPLES[key] for key in self._policy.percentiles)
        return _has_samples(rounds, needed) and _steady(rounds)

    def _add_round(self) -> None:
        """Time one block of each entrant, in a new random order."""
        self._shuffle.shuffle(self._order)
        blocks = {name: self._block(name) for name in self._order}
        timed = [name for name in self._calls if name in blocks]
        self._wall.append({name: blocks[name].wall for name in timed})
        self._cpu.append({name: blocks[name].cpu for name in timed})

    def _block(self, name: str) -> _Block:
        """Time one block of an entrant's calls."""
        if name in self._resets:
            self._resets[name]()
        block, left_ms = _Block([], []), self._policy.block_ms
        while left_ms > 0 and len(block.wall) < MOST_CALLS:
            used_s = time.thread_time()
            block.wall.append(self._meter.timed_ms(next(self._calls[name])))
            block.cpu.append((time.thread_time() - used_s) * 1e3)
            left_ms -= block.wall[-1]
        return block

    def sampling(self) -> Sampling:
        """The undisturbed rounds; if they are too few, all rounds by CPU time if that is valid, or
        if noise is accepted.
        """
        num_dropped = len(self._wall) - len(self._undisturbed)
        disturbance = self._meter.disturbance() if num_dropped else ""
        clock, rounds = self._valid_rounds()
        stable = _enough(rounds, self._policy)
        if disturbance and (not stable or clock != "wall"):
            message = "%d of %d rounds were disturbed; %s"
            logger.warning(message, num_dropped, len(self._wall), disturbance)
        samples_ms = {}
        estimates_ms = {}
        for name in self._calls:
            samples_ms[name] = [blocks[name] for blocks in rounds if name in blocks]
            tried = [statistics.median(blocks[name]) for blocks in self._wall if name in blocks]
            estimates_ms[name] = statistics.median(tried)
        return Sampling(
            samples_ms=samples_ms,
            num_dropped=num_dropped,
            settled=self._is_settled(),
            stable=stable,
            clock=clock,
            disturbance=disturbance,
            estimates_ms=estimates_ms,
            device=self._meter.facts(),
        )

    def _valid_rounds(self) -> tuple[Clock, list[Round]]:
        """The rounds that count, and the clock that measured them."""
        if not _enough(self._undisturbed, self._policy) and _enough(self._wall, self._policy):
            if self._meter.single_threaded() and _steady(self._cpu):
                return "cpu", self._cpu
            if self._policy.accept_noise:
                return "disturbed", self._wall
        return "wall", self._undisturbed


def _enough(rounds: Sequence[Round], policy: SamplingPolicy) -> bool:
    """Whether the rounds are enough for a result."""
    return len(rounds) >= policy.min_rounds and _has_samples(rounds, policy.min_samples)


def _has_samples(rounds: Sequence[Round], needed: int) -> bool:
    """Whether every entrant that was not stopped has enough samples."""
    for name in rounds[-1]:
        num_samples = sum(len(blocks[name]) for blocks in rounds)
        if num_samples < needed:
            return False
    return True


def _steady(rounds: Sequence[Round]) -> bool:
    """Whether the means of the last 3 windows are within 10% of their mean, for every entrant that
    was not stopped.
    """
    window = max(1, len(rounds) // 4)
    ends = [len(rounds) - index * window for index in range(3)]
    for name in rounds[-1]:
        means = []
        for end in ends:
            blocks = [blocks[name] for blocks in rounds[end - window : end]]
            means.append(statistics.fmean(chain.from_iterable(blocks)))
        overall = statistics.fmean(means)
        if any(abs(mean - overall) > 0.1 * overall for mean in means):
            return False
    return True
