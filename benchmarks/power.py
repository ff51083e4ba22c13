"""Simulate how often a judge's intervals contain the true speedup, and how often it publishes; and
what looks before the end would save and cost.

    python -m benchmarks.power [--trials 2000]

Eager and one candidate run in rounds of a 60 ms block each, in random order, on a simulated machine
whose noise multiplies the latency of every call. Eager takes 1 ms, the candidate the true speedup
less. The intervals are those of freezer/timing/intervals.py. A look ends the timing where an
interval excludes `speedup_min`; all looks together spend the level of one interval.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.pages import machine, markdown_table, results_page
from freezer.timing.intervals import exchanges, is_larger, of_means, of_ranks

Array = NDArray[np.float64]
Noise = Callable[[np.random.Generator, int, int], Array]

BLOCK_MS = 60
CHUNK = 100
SLOW, BURST = math.log(1.4), math.log(3)
SPEEDUPS = (1.0, 1.05, 1.1, 1.25, 2.0)
SPEEDUP_MIN = 1.05
ROUNDS = (10, 41)
"""Rounds of a deciding cell: the least, and those of two entrants within 5 s."""

Plan = Sequence[tuple[float, float]]
"""Shares of the rounds, and one-sided levels of the tests then."""

TODAY: Plan = ((1.0, 0.025),)
LOOKS: Mapping[str, Plan] = {
    "O'Brien-Fleming": ((0.5, 0.00151), (1.0, 0.02436)),
    "Pocock": ((0.25, 0.00875), (0.5, 0.00885), (1.0, 0.01291)),
}
"""Plans that have spent 0.025 at a share t of the rounds by 2 - 2 Phi(2.2414 / sqrt(t)), or by
0.025 log(1 + (e - 1) t) (Lan and DeMets 1983). After a quarter, the first would test at a level of
7e-6, but the exchanges of ten rounds reach no less than 2**-10.
"""


def quiet(rng: np.random.Generator, trials: int, rounds: int) -> Array:
    """Blocks differ by 0.3%."""
    return _blocks(0.003 * rng.standard_normal((trials, rounds)))


def bimodal(rng: np.random.Generator, trials: int, rounds: int) -> Array:
    """Each block is at one of two speeds, 1 and 1.4."""
    modes = rng.random((trials, rounds)) < 0.5
    return _blocks(SLOW * modes + 0.01 * rng.standard_normal((trials, rounds)))


def switching(rng: np.random.Generator, trials: int, rounds: int) -> Array:
    """The machine changes between the speeds 1 and 1.4 every 150 ms."""
    switches = rng.random((trials, rounds * BLOCK_MS)) < 1 / 150
    start = rng.integers(0, 2, (trials, 1))
    return np.where((start + switches.cumsum(axis=1)) % 2, SLOW, 0.0)


def mixed_calls(rng: np.random.Generator, trials: int, rounds: int) -> Array:
    """Each millisecond is at one of two speeds, 1 and 1.4."""
    return np.where(rng.random((trials, rounds * BLOCK_MS)) < 0.5, SLOW, 0.0)


def bursts(rng: np.random.Generator, trials: int, rounds: int) -> Array:
    """For 15 ms, 4 times a second, everything takes 3 times as long."""
    return _bursts(rng, trials, rounds, length_ms=15, every_ms=250)


def long_bursts(rng: np.random.Generator, trials: int, rounds: int) -> Array:
    """For 40 ms, 7 times a second, everything takes 3 times as long."""
    return _bursts(rng, trials, rounds, length_ms=40, every_ms=150)


def heavy_tails(rng: np.random.Generator, trials: int, rounds: int) -> Array:
    """Blocks differ by Student's t with 2 degrees of freedom, 5%; so do calls, with 3."""
    blocks = 0.05 * rng.standard_t(2, (trials, rounds))
    return _blocks(blocks) + 0.05 * rng.standard_t(3, (trials, rounds * BLOCK_MS))


def slow_calls(rng: np.random.Generator, trials: int, rounds: int) -> Array:
    """Calls are slower by the absolute value of Student's t with 2 degrees of freedom, 10%."""
    calls = np.abs(rng.standard_t(2, (trials, rounds * BLOCK_MS)))
    return _blocks(0.02 * rng.standard_normal((trials, rounds))) + 0.1 * calls


def drift(rng: np.random.Generator, trials: int, rounds: int) -> Array:
    """The machine becomes 40% slower, and 10% faster and slower twice; blocks differ by 5%."""
    share = np.linspace(0, 1, rounds)
    phase = rng.random((trials, 1)) * 2 * np.pi
    slow = 0.4 * share + 0.1 * np.sin(12 * share + phase)
    return _blocks(slow + 0.05 * rng.standard_normal((trials, rounds)))


def autocorrelated(rng: np.random.Generator, trials: int, rounds: int) -> Array:
    """Blocks differ by 15%; the correlation of one block with the next is 0.9."""
    steps = rng.standard_normal((trials, rounds))
    levels = steps.copy()
    for index in range(1, rounds):
        levels[:, index] = 0.9 * levels[:, index - 1] + np.sqrt(0.19) * steps[:, index]
    return _blocks(0.15 * levels)


NOISES: Mapping[str, Noise] = {
    "quiet": quiet,
    "bimodal": bimodal,
    "bimodal, switching": switching,
    "bimodal calls": mixed_calls,
    "short bursts": bursts,
    "long bursts": long_bursts,
    "heavy tails": heavy_tails,
    "heavy-tailed calls": slow_calls,
    "drift": drift,
    "autocorrelated": autocorrelated,
}


def _blocks(levels: Array) -> Array:
    return np.repeat(levels, BLOCK_MS, axis=1)


def _bursts(
    rng: np.random.Generator, trials: int, rounds: int, *, length_ms: int, every_ms: int
) -> Array:
    starts = (rng.random((trials, rounds * BLOCK_MS)) < 1 / every_ms).cumsum(axis=1)
    before = np.pad(starts, ((0, 0), (length_ms, 0)))[:, :-length_ms]
    levels = 0.01 * rng.standard_normal((trials, rounds))
    return BURST * (starts > before) + _blocks(levels)


def figures(
    noise: Noise, rng: np.random.Generator, trials: int, rounds: int, speedup: float, *, mean: bool
) -> tuple[Array, Array]:
    """Medians or means of the blocks of eager and of the candidate, [trials, rounds]."""
    each_ms = noise(rng, trials, 2 * rounds).reshape(trials, rounds, 2, BLOCK_MS)
    swapped = rng.random((trials, rounds)) < 0.5
    each_ms[swapped] = each_ms[swapped][:, ::-1]
    found = []
    for entrant, faster in enumerate((1.0, speedup)):
        times = (np.arange(round(BLOCK_MS * faster)) / faster).astype(int)
        calls = each_ms[:, :, entrant, times]
        calls += 0.02 * rng.standard_normal(calls.shape)
        latencies = np.exp(calls) / faster
        found.append(latencies.mean(axis=-1) if mean else np.median(latencies, axis=-1))
    return found[0], found[1]


def rates(noise: str, rounds: int, speedup: float, trials: int, *, mean: bool) -> Array:
    """What each plan finds, [plan, figure]: percent of the intervals that contain the true speedup,
    percent with a lower bound above SPEEDUP_MIN, and percent of the rounds that were run.
    """
    cell = [list(NOISES).index(noise), rounds, round(100 * speedup)]
    rng = np.random.default_rng(cell)
    plans = (TODAY, *LOOKS.values()) if rounds > ROUNDS[0] else (TODAY,)
    totals = np.zeros((len(plans), 3))
    for start in range(0, trials, CHUNK):
        num = min(CHUNK, trials - start)
        blocks = figures(NOISES[noise], rng, num, rounds, speedup, mean=mean)
        eager, candidate = (torch.from_numpy(block).log() for block in blocks)
        for index, plan in enumerate(plans):
            totals[index] += _by_plan(eager, candidate, plan, speedup, mean=mean)
    return 100 * totals / trials


def _by_plan(
    eager: Tensor, candidate: Tensor, plan: Plan, speedup: float, *, mean: bool
) -> list[float]:
    """The numbers of covered and of published ones, and the sum of shares of rounds."""
    covered = published = run = 0.0
    for share, level in plan:
        num_rounds = int(share * eager.shape[1])
        logs = (eager[:, :num_rounds], candidate[:, :num_rounds])
        above, below = _outside(*logs, SPEEDUP_MIN, level, mean=mean)
        missed = torch.logical_or(*_outside(*logs, speedup, level, mean=mean))
        ended = above | below | (share == 1)
        covered += (ended & ~missed).sum().item()
        published += above.sum().item()
        run += share * ended.sum().item()
        eager, candidate = eager[~ended], candidate[~ended]
    return [covered, published, run]


def _outside(
    eager: Tensor, candidate: Tensor, ratio: float, level: float, *, mean: bool
) -> tuple[Tensor, Tensor]:
    """Whether the interval is above a ratio, and whether it is below."""
    differences = of_means if mean else of_ranks
    scaled, signs = eager - math.log(ratio), exchanges(eager.shape[1], seed=0)
    above = is_larger(scaled, candidate, differences, level, signs)
    return above, is_larger(candidate, scaled, differences, level, signs)


def rows(trials: int, *, mean: bool) -> Iterator[list[str]]:
    """A row for each noise and number of rounds."""
    for noise, rounds in itertools.product(NOISES, ROUNDS):
        cells = [rates(noise, rounds, speedup, trials, mean=mean) for speedup in SPEEDUPS]
        covered, published, run = np.stack(cells, axis=2).swapaxes(0, 1)
        row = [_mean_and_least(covered[0]), *(f"{each:.1f}" for each in published[0])]
        for plan in range(1, len(covered)):
            worst = (published[plan] - published[0]).min()
            row += [_mean_and_least(covered[plan]), f"{worst:+.1f}"]
            row.append(" ".join(f"{each:.0f}" for each in run[plan]))
        row += [""] * 3 * (1 + len(LOOKS) - len(covered))
        print(noise, rounds, *row, flush=True)
        yield [noise, str(rounds), *row]


def _mean_and_least(rates: Array) -> str:
    return f"{rates.mean():.1f} ({rates.min():.1f})"


def page(trials: int) -> str:
    """The page of results."""
    head = ["noise", "rounds", "covered"]
    head += [f"published at {speedup:g}" for speedup in SPEEDUPS]
    for name in LOOKS:
        head += [f"{name}: covered", "published, worst change", "rounds run"]
    lines = [
        "# Coverage and power of the intervals of speedups",
        "",
        *machine(),
        f"- Command: `python -m benchmarks.power --trials {trials}`",
        "",
        f"{trials} simulated judges of one candidate a cell. Covered: percent of the 95% intervals"
        " with the true speedup, over all five speedups (and for the worst of them). Published:"
        f" percent with a lower bound above {SPEEDUP_MIN}. A figure of {trials} trials has a"
        f" standard error of up to {50 / trials**0.5:.1f}, at 95% {21.8 / trials**0.5:.1f}.",
        "",
        "The last columns are the same judges, if looks ended them: after half of the rounds"
        " (O'Brien and Fleming), or after a quarter and half (Pocock). The worst change is that of"
        " published over the five speedups. Rounds run are percent of all, for each speedup.",
        "",
        *(f"- {name}: {noise.__doc__}" for name, noise in NOISES.items()),
    ]
    for title, mean in (("Medians (objectives p50, size)", False), ("Throughput", True)):
        lines += ["", f"## {title}", "", *markdown_table(head, rows(trials, mean=mean))]
    return "\n".join([*lines, ""])


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=2000, help="simulated judges a cell")
    path = results_page("power")
    path.write_text(page(parser.parse_args().trials))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
