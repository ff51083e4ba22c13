"""Speedup of a candidate over eager, with a confidence interval, from the samples of both."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freezer.spec import SamplingPolicy, Timing
from freezer.timing.sampling import Sampling

Blocks = Sequence[Sequence[float]]
"""Latencies of an entrant by round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speedup:
    """Ratio of a figure of all blocks, eager's over the candidate's, and its confidence interval;
    see `speedup`.
    """

    value: float
    low: float
    high: float


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
        sampling: samples of both.
        candidate, eager: names of entrants.
        num_candidates: number of competing candidates; the interval is widened to hold for all of
            them at once (Bonferroni).
        policy: number of resamples, and seed.
        timing: the figure to compare: the median of the blocks' medians, the 95th percentile of all
            calls, or, for throughput, the mean of the blocks' means.
    """
    num_rounds = min(len(sampling.samples_ms[name]) for name in (candidate, eager))
    theirs = sampling.samples_ms[candidate][:num_rounds]  # one may have been stopped
    eagers = sampling.samples_ms[eager][:num_rounds]
    generator = torch.Generator().manual_seed(policy.seed)
    shape = (policy.num_bootstrap, num_rounds)
    picks = torch.randint(0, num_rounds, shape, generator=generator)
    ratios = _figures(eagers, picks, timing) / _figures(theirs, picks, timing)
    tail = 0.025 / max(num_candidates, 1)
    low, high = torch.quantile(ratios, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    each = torch.arange(num_rounds)[None]
    value = float(_figures(eagers, each, timing) / _figures(theirs, each, timing))
    return Speedup(value=value, low=min(low, value), high=max(high, value))


def _figures(blocks: Blocks, picks: Tensor, timing: Timing) -> Tensor:
    """A figure of blocks for each row of picks, [resamples, rounds]."""
    if timing == "p95":
        return _p95(blocks, picks)
    of_block = statistics.fmean if timing == "throughput" else statistics.median
    figures = torch.tensor([of_block(block) for block in blocks], dtype=torch.float64)[picks]
    return figures.mean(dim=1) if timing == "throughput" else figures.quantile(0.5, dim=1)


def _p95(blocks: Blocks, picks: Tensor) -> Tensor:
    """The 95th percentile of the calls of each row's blocks, where all blocks weigh the same."""
    sizes = torch.tensor([len(block) for block in blocks])
    pooled = [ms for block in blocks for ms in block]
    calls, order = torch.tensor(pooled, dtype=torch.float64).sort()
    block_of = torch.arange(len(blocks)).repeat_interleave(sizes)[order]
    ranks = []
    for row in picks:
        weights = torch.bincount(row, minlength=len(blocks)) / sizes.double()
        ranks.append(torch.searchsorted(weights[block_of].cumsum(0), 0.95 * len(row) - 1e-9))
    return calls[torch.stack(ranks).clamp(max=len(calls) - 1)]
