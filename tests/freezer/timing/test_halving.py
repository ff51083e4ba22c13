"""Halving: how often it stops an entrant that it should not, and whether the winner's figures stay
the same.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace

from freezer.spec import SamplingPolicy
from freezer.timing import Sampling, sample, speedup
from freezer.timing.intervals import FALSE_STOPS, FIRST_LOOK, Halving
from tests.support.steps import QUICK

POLICY = SamplingPolicy(num_bootstrap=1)
NUM_CONTESTS = 150


def contest(
    seed: int, ms: Mapping[str, float], *, halved: bool, noise: float = 0.1, num_rounds: int = 24
) -> Sampling:
    """Simulate a judge on a machine whose speed drifts; one block in twenty of any entrant takes up
    to three times as long.
    """
    rng = random.Random(seed)
    machine = 1.0
    others = {name: set(ms) - {name, "eager"} for name in ms if name != "eager"}
    halving = Halving(others if halved else {})
    active = list(ms)
    rounds: list[dict[str, list[float]]] = []
    for _ in range(num_rounds):
        machine *= rng.lognormvariate(0, 0.05)
        blocks = {
            name: [ms[name] * machine * rng.lognormvariate(0, noise) * _outlier(rng)] for name in ms
        }
        rounds.append({name: blocks[name] for name in active})
        beaten = halving.beaten(rounds)
        active = [name for name in active if name not in beaten]
    samples = {name: [blocks[name] for blocks in rounds if name in blocks] for name in ms}
    return Sampling(samples_ms=samples, num_dropped=0, settled=True, stable=True)


def _outlier(rng: random.Random) -> float:
    return rng.uniform(1, 3) if rng.random() < 0.05 else 1.0


def reported(sampling: Sampling) -> tuple[str, float]:
    """The winner as the judge selects it, and its speedup."""
    names = [name for name in sampling.samples_ms if name != "eager"]
    found = {
        name: speedup(sampling, name, eager="eager", num_candidates=len(names), policy=POLICY).value
        for name in names
    }
    winner = min(names, key=lambda name: (sampling.stopped(name), -found[name]))
    return winner, found[winner]


def test_equals_are_seldom_stopped() -> None:
    ms = {"eager": 10.0, **{f"c{i}": 5.0 for i in range(6)}}
    samplings = [contest(seed, ms, halved=True) for seed in range(NUM_CONTESTS)]
    num_stopped = sum(any(sampling.stopped(name) for name in ms) for sampling in samplings)
    assert num_stopped <= 2 * FALSE_STOPS * NUM_CONTESTS


def test_winner_keeps_its_figures() -> None:
    ms = {"eager": 10.0, "best": 4.0, "close": 4.1, "slow": 6.0, "slower": 12.0}
    with_, without = (
        [reported(contest(seed, ms, halved=halved)) for seed in range(NUM_CONTESTS)]
        for halved in (True, False)
    )
    assert (
        sum(one[0] == other[0] for one, other in zip(with_, without, strict=True))
        >= 0.99 * NUM_CONTESTS
    )
    bias = statistics.fmean(
        math.log(one[1] / other[1]) for one, other in zip(with_, without, strict=True)
    )
    assert abs(bias) < 0.002
    assert all(contest(seed, ms, halved=True).stopped("slower") for seed in range(20))


def test_slow_entrants_leave_their_time_to_others() -> None:
    calls = {
        name: [lambda ms=ms: time.sleep(ms / 1e3)]
        for name, ms in (("eager", 4), ("fast", 1), ("slow", 8), ("alone", 8))
    }
    rivals = {"fast": {"slow", "not here"}, "slow": {"fast"}, "not here": {"fast"}}
    policy = replace(QUICK, block_ms=4.0, time_limit_s=3.0, num_bootstrap=100)
    found = sample(calls, policy, rivals=rivals)
    assert {name for name in calls if found.stopped(name)} == {"slow"}
    num_slow, num_fast = (len(found.samples_ms[name]) for name in ("slow", "fast"))
    assert FIRST_LOOK <= num_slow < num_fast == found.num_undisturbed
    ratio = speedup(found, "slow", eager="eager", num_candidates=1, policy=policy)
    assert ratio.low <= ratio.value < 1
