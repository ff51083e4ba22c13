"""Sampling: percentiles, confidence intervals, order, rotation and disturbed rounds."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from freezer.runtime.torch_settings import threads
from freezer.spec import SamplingPolicy, Timing
from freezer.timing import MIN_SAMPLES, Sampling, Speedup, policy_for, sample, speedup
from tests.support.steps import QUICK

ALL = SamplingPolicy(percentiles=tuple(MIN_SAMPLES), num_bootstrap=200)


def sampling_of(**blocks: list[list[float]]) -> Sampling:
    return Sampling(samples_ms=blocks, num_dropped=0, settled=True, stable=True)


def gain(sampling: Sampling, num_candidates: int = 1, timing: Timing = "p50") -> Speedup:
    """The speedup of `candidate` over `eager`."""
    return speedup(
        sampling,
        "candidate",
        eager="eager",
        num_candidates=num_candidates,
        policy=ALL,
        timing=timing,
    )


@pytest.mark.parametrize(("key", "count"), MIN_SAMPLES.items())
def test_percentiles_need_enough_samples(key: str, count: int) -> None:
    enough, less = ([[float(i) for i in range(n)]] for n in (count, count - 1))
    assert sampling_of(eager=enough).percentiles("eager", ALL)[key] is not None
    assert sampling_of(eager=less).percentiles("eager", ALL)[key] is None


def test_percentiles_are_nearest_rank() -> None:
    values = [float(i) for i in range(1, 664)]
    random.Random(0).shuffle(values)
    found = sampling_of(eager=[values[:100], values[100:]]).percentiles("eager", ALL)
    assert found == {"p50": 332.0, "p90": 597.0, "p95": 630.0, "p99": 657.0, "p99.9": None}


def noisy(seed: int, ratio: float) -> Sampling:
    """Rounds on a machine of varying speed, with a candidate that is `ratio` times as fast."""
    rng = random.Random(seed)
    eager = []
    candidate = []
    for _ in range(30):
        machine = rng.lognormvariate(0, 0.3)
        eager.append([10 * machine * rng.lognormvariate(0, 0.05) for _ in range(15)])
        candidate.append([10 / ratio * machine * rng.lognormvariate(0, 0.05) for _ in range(15)])
    return sampling_of(eager=eager, candidate=candidate)


def test_the_interval_contains_the_true_ratio() -> None:
    intervals = [gain(noisy(seed, 1.5)) for seed in range(40)]
    assert sum(found.low <= 1.5 <= found.high for found in intervals) >= 36
    assert all(found.low <= found.value <= found.high for found in intervals)
    assert sum(found.low > 1.0 for found in intervals) >= 36


def test_the_interval_widens_with_more_candidates() -> None:
    one, many = (gain(noisy(1, 1.5), num_candidates=n) for n in (1, 20))
    assert many.low < one.low
    assert many.high > one.high
    assert many.value == one.value


def quartered(seed: int) -> Sampling:
    """Rounds whose blocks are at one of two speeds each; the candidate is 1.25 times as fast."""
    rng = random.Random(seed)

    def blocks(ms: float) -> list[list[float]]:
        modes = [rng.choice((1.0, 1.4)) for _ in range(60)]
        return [[ms * mode * rng.lognormvariate(0, 0.02) for _ in range(9)] for mode in modes]

    return sampling_of(eager=blocks(10), candidate=blocks(8))


def test_two_speeds_of_a_machine_hide_no_speedup() -> None:
    """Medians of all rounds may be of different speeds: their ratio says little."""
    found = [gain(quartered(seed)) for seed in range(20)]
    assert sum(each.low > 1.05 for each in found) >= 16
    assert sum(each.low <= 1.25 <= each.high for each in found) >= 16


@pytest.mark.parametrize("timing", ["p50", "throughput"])
def test_intervals_of_few_rounds_contain_the_true_ratio(timing: Timing) -> None:
    def blocks(rng: random.Random, ms: float) -> list[list[float]]:
        return [[ms * rng.lognormvariate(0, 0.5)] for _ in range(10)]

    num_covered = 0
    for seed in range(200):
        rng = random.Random(seed)
        found = gain(sampling_of(eager=blocks(rng, 12), candidate=blocks(rng, 10)), timing=timing)
        num_covered += found.low <= 1.2 <= found.high
    assert num_covered >= 185


def entrants(
    log: list[tuple[str, int]], names: str = "abc", inputs: int = 3
) -> dict[str, list[Callable[[], None]]]:
    def call(name: str, index: int) -> None:
        log.append((name, index))
        time.sleep(0.0005)

    return {name: [partial(call, name, index) for index in range(inputs)] for name in names}


def test_inputs_rotate() -> None:
    log: list[tuple[str, int]] = []
    sampling = sample(entrants(log, "a"), replace(QUICK, block_ms=2.0, warmup_s=0.02))
    timed = [index for _, index in log[len(log) - len(sampling.pooled("a")) :]]
    assert timed == [(timed[0] + index) % 3 for index in range(len(timed))]


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Another process uses every CPU of this process."""
    hogs = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in os.sched_getaffinity(0)
    ]
    time.sleep(0.2)
    yield
    for hog in hogs:
        hog.kill()
        hog.wait()


def test_disturbed_rounds_are_dropped(busy_machine: None) -> None:
    calls = {"a": [lambda: time.sleep(0.001)]}
    strict = SamplingPolicy(
        time_limit_s=0.3, warmup_s=0.05, min_rounds=2, busy_limit=0.25, steal_limit=2.0
    )
    disturbed = sample(calls, strict)
    assert disturbed.num_dropped > 0
    assert not disturbed.stable
    forgiving = sample(calls, replace(strict, busy_limit=2.0))
    assert forgiving.num_dropped == 0
    assert forgiving.stable


def spin(count: int) -> None:
    sum(range(count))


SPINS: dict[str, list[Callable[[], Any]]] = {
    "one": [partial(spin, 10_000)],
    "three": [partial(spin, 30_000)],
}
STRICT = SamplingPolicy(
    time_limit_s=0.4, warmup_s=0.05, min_rounds=5, block_ms=10.0, num_bootstrap=200
)


def test_cpu_time_decides_between_disturbed_calls_of_one_thread(busy_machine: None) -> None:
    with threads(
        1
    ):  # neighbours may make CPU times unsteady, too: then not stable, and tried again
        samplings = (sample(SPINS, replace(STRICT, time_limit_s=1.0)) for _ in range(5))
        found = next(sampling for sampling in samplings if sampling.stable)
    assert found.clock == "cpu"
    assert 2.5 < speedup(found, "one", eager="three", num_candidates=1, policy=STRICT).value < 3.5
    assert "other processes used" in found.disturbance


def test_several_threads_have_no_cpu_time(busy_machine: None) -> None:
    with threads(2):
        found = sample(SPINS, STRICT)
    assert (found.stable, found.clock) == (False, "wall")
    assert "other processes used" in found.problem


def test_slow_models_get_enough_rounds() -> None:
    policy = replace(STRICT, min_rounds=10, time_limit_s=0.06, busy_limit=2.0, steal_limit=2.0)
    found = sample({"a": [lambda: time.sleep(0.05)]}, policy)
    assert found.stable
    assert len(found.samples_ms["a"]) >= 10
    never = sample(
        {"a": [lambda: time.sleep(0.2)]}, replace(policy, time_limit_s=0.03, warmup_s=0.0)
    )
    assert not never.stable
    assert never.problem.endswith(
        "(0 dropped); too few to measure speed of a model as slow as this"
    )


class Growing:
    """A call whose state grows."""

    def __init__(self) -> None:
        self.state = self.most = self.num_resets = 0

    def __call__(self) -> None:
        self.state += 1
        self.most = max(self.most, self.state)

    def reset(self) -> None:
        self.state = 0
        self.num_resets += 1


def test_states_are_reset() -> None:
    with_reset = Growing()
    without = Growing()
    policy = replace(QUICK, block_ms=0.001)
    found = sample({"with": [with_reset], "without": [without]}, policy, {"with": with_reset.reset})
    assert with_reset.num_resets > len(found.samples_ms["with"])
    assert with_reset.most <= 1000
    assert without.most == without.state > with_reset.most
    assert without.num_resets == 0


def tailed(seed: int, *, tail_ms: float) -> list[list[float]]:
    """Thirty rounds of calls of 1 ms, of which a tenth take `tail_ms`."""
    rng = random.Random(seed)
    return [
        [(tail_ms if rng.random() < 0.1 else 1.0) * rng.lognormvariate(0, 0.02) for _ in range(20)]
        for _ in range(30)
    ]


def test_p95_and_throughput_see_the_tail() -> None:
    sampling = sampling_of(eager=tailed(1, tail_ms=8), candidate=tailed(2, tail_ms=4))
    expected: dict[Timing, float] = {"p50": 1.0, "p95": 2.0, "throughput": 1.7 / 1.3}
    for timing, ratio in expected.items():
        found = gain(sampling, timing=timing)
        assert found.value == pytest.approx(ratio, rel=0.2), timing
        assert found.low <= ratio <= found.high, timing


def test_slow_calls_are_sampled_until_p95_has_enough() -> None:
    policy = replace(policy_for("p95", QUICK), block_ms=1.0, warmup_s=0.01, time_limit_s=0.1)
    calls = {"a": [lambda: time.sleep(0.004)]}
    assert len(sample(calls, replace(policy, min_samples=0)).pooled("a")) < MIN_SAMPLES["p95"]
    enough = sample(calls, policy)
    assert enough.stable
    assert enough.percentiles("a", policy)["p95"] is not None
    assert not sample(calls, replace(policy, time_limit_s=0.01)).stable, (
        "too few within 20 times the limit"
    )
