"""Simulate how often a judge's intervals contain the true speedup, and how often it publishes.

    python -m benchmarks.power [--trials 300]

Eager and one candidate run in rounds of a 60 ms block each, in random order, on a simulated machine
whose noise multiplies the latency of every call. Eager takes 1 ms, the candidate the true speedup
less. "before" is the method of earlier checkouts, a bootstrap over rounds of the ratio of two
medians (with throughput, means); "now" is freezer/timing/intervals.py.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.pages import machine, markdown_table, results_page
from freezer.timing.intervals import of_means, of_ranks, ratio_interval

Array = NDArray[np.float64]
Noise = Callable[[np.random.Generator, int, int], Array]

BLOCK_MS = 60
NUM_BOOTSTRAP = 1000
TAIL = 0.025
CHUNK = 100
SLOW, BURST = math.log(1.4), math.log(3)
SPEEDUPS = (1.0, 1.05, 1.1, 1.25, 2.0)
SPEEDUP_MIN = 1.05
DURATIONS = {"1 s": 10, "10 s": 83}
"""Rounds of a sampling; a judge takes at least 10."""


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


def before(eager: Array, candidate: Array, *, mean: bool) -> tuple[Array, Array]:
    """The bounds of the bootstrap."""
    num_rounds = eager.shape[1]
    picks = np.random.default_rng(0).integers(0, num_rounds, (NUM_BOOTSTRAP, num_rounds))
    picks = np.vstack([np.arange(num_rounds), picks])  # the first are as measured
    figure = _means if mean else _medians
    ratios = figure(eager, picks) / figure(candidate, picks)
    low, high = np.quantile(ratios[:, 1:], [TAIL, 1 - TAIL], axis=1)
    return np.minimum(low, ratios[:, 0]), np.maximum(high, ratios[:, 0])


def _means(blocks: Array, picks: NDArray[np.int64]) -> Array:
    return np.stack([each[picks].mean(axis=1) for each in blocks])


def _medians(blocks: Array, picks: NDArray[np.int64]) -> Array:
    """The medians of picked blocks, by their ranks: numpy is fast with small numbers."""
    middle = [(picks.shape[1] - 1) // 2, picks.shape[1] // 2]
    medians = []
    for each in blocks:
        ranks = each.argsort().argsort().astype(np.int16)
        middle_ranks = np.partition(ranks[picks], middle, axis=1)[:, middle]
        medians.append(np.sort(each)[middle_ranks].mean(axis=1))
    return np.stack(medians)


def now(eager: Array, candidate: Array, *, mean: bool) -> tuple[Array, Array]:
    """The bounds of the permutation test."""
    differences = of_means if mean else of_ranks
    _, low, high = ratio_interval(
        torch.from_numpy(eager), torch.from_numpy(candidate), differences, tail=TAIL, seed=0
    )
    return low.numpy(), high.numpy()


METHODS = (before, now)


def rates(noise: str, duration: str, speedup: float, trials: int, *, mean: bool) -> Array:
    """Coverage and power of each method, in percent of the trials, [method, 2]."""
    cell = [list(NOISES).index(noise), DURATIONS[duration], round(100 * speedup)]
    rng = np.random.default_rng(cell)
    counts = np.zeros((len(METHODS), 2))
    for start in range(0, trials, CHUNK):
        num = min(CHUNK, trials - start)
        blocks = figures(NOISES[noise], rng, num, DURATIONS[duration], speedup, mean=mean)
        for index, method in enumerate(METHODS):
            low, high = method(*blocks, mean=mean)
            counts[index, 0] += ((low <= speedup) & (speedup <= high)).sum()
            counts[index, 1] += (low > SPEEDUP_MIN).sum()
    return 100 * counts / trials


def rows(trials: int, *, mean: bool) -> Iterator[list[str]]:
    """A row for each noise and duration."""
    for noise, duration in itertools.product(NOISES, DURATIONS):
        cells = [rates(noise, duration, speedup, trials, mean=mean) for speedup in SPEEDUPS]
        covered, published = np.transpose(cells)
        least = covered.min(axis=1)
        row = [
            f"{one:.1f} ({worst:.1f})"
            for one, worst in zip(covered.mean(axis=1), least, strict=True)
        ]
        row += [f"{old:.1f} → {new:.1f}" for old, new in published.T]
        print(noise, duration, *row, flush=True)
        yield [noise, duration, *row]


def page(trials: int) -> str:
    """The page of results."""
    head = ["noise", "sampling", "covered before", "covered now"]
    head += [f"published at {speedup:g}" for speedup in SPEEDUPS]
    lines = [
        "# Coverage and power of the intervals of speedups",
        "",
        *machine(),
        f"- Command: `python -m benchmarks.power --trials {trials}`",
        "",
        f"{trials} simulated judges of one candidate a cell. Covered: percent of the 95% intervals"
        " with the true speedup, over all five speedups (and for the worst of them). Published:"
        f" percent with a lower bound above {SPEEDUP_MIN}, before → now. 1 s are"
        f" {DURATIONS['1 s']} rounds, 10 s {DURATIONS['10 s']}. A figure of {trials} trials has a"
        f" standard error of up to {50 / trials**0.5:.1f}, at 95% {21.8 / trials**0.5:.1f}.",
        "",
        *(f"- {name}: {noise.__doc__}" for name, noise in NOISES.items()),
    ]
    for title, mean in (("Medians (objectives p50, size)", False), ("Throughput", True)):
        lines += ["", f"## {title}", "", *markdown_table(head, rows(trials, mean=mean))]
    return "\n".join([*lines, ""])


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=300, help="simulated judges a cell")
    path = results_page("power")
    path.write_text(page(parser.parse_args().trials))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
