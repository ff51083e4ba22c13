"""Confidence intervals of the ratio of two entrants' latencies, over rounds with a block of each.

The order of the blocks in a round is random. If one entrant's figures are divided by the true
ratio, the two blocks of any round could be exchanged as well: each exchange changes the sign of
their difference, and the signs that were measured are as probable as any others. The interval
consists of the ratios that this permutation test does not reject (Fisher 1935; Maritz 1979). It
holds for every distribution of the noise, also if the noise of a round depends on that of others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from freezer.runtime.draws import Draws

NUM_EXCHANGES = 4096
"""Random exchanges of blocks that the test compares."""

NUM_HALVINGS = 26
"""Halvings of the range of possible ratios in search of a bound."""

Differences = Callable[[Tensor, Tensor], Tensor]
"""The difference of the blocks of each round, from the logarithms of their figures."""


def of_ranks(first: Tensor, second: Tensor) -> Tensor:
    """Differences of scores of the ranks among the blocks of all rounds.

    The score is bounded, and steepest in the middle: disturbed blocks count little. Where rounds
    differ more than entrants, as on a machine that changes its speed, mostly the sign is left.
    """
    pooled = torch.cat([first, second], dim=-1)
    ranks = pooled.argsort(dim=-1).argsort(dim=-1) + 0.5
    scores = torch.tanh(4 * ranks.double() / pooled.shape[-1] - 2)
    first_scores, second_scores = scores.chunk(2, dim=-1)
    return first_scores - second_scores


def of_means(first: Tensor, second: Tensor) -> Tensor:
    """Differences of the figures; they add up to 0 at the ratio of the means."""
    return first.exp() - second.exp()


def exchanges(num_rounds: int, seed: int) -> Tensor:
    """The signs of each round's difference in random exchanges of its blocks, and in those of all
    others, [rounds, NUM_EXCHANGES]; the first is as measured.
    """
    shape = (num_rounds, NUM_EXCHANGES // 2)
    signs = 1.0 - 2 * Draws(seed).integers(0, 2, shape).double()
    signs[:, 0] = 1
    return torch.cat([signs, -signs], dim=1)


def is_larger(
    first: Tensor, second: Tensor, differences: Differences, share: float, signs: Tensor
) -> Tensor:
    """Whether the differences have a positive sum, and at most a share of the exchanges as large a
    one.

    Args:
        first, second: logarithms of the figures of the blocks, [..., rounds].
        differences: the statistic of a round.
        share: level of the one-sided test.
        signs: see `exchanges`.
    """
    each = differences(first, second)
    total = each.sum(dim=-1, keepdim=True)
    as_large = each @ signs >= total * (1 - 1e-9)
    return (as_large.double().mean(dim=-1) <= share) & (total[..., 0] > 0)


def ratio_interval(
    first: Tensor, second: Tensor, differences: Differences, *, tail: float, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Estimate the ratio of two entrants' figures.

    Args:
        first, second: figures of their blocks, [..., rounds], float64.
        differences: the statistic of a round.
        tail: probability that the ratio is below the interval, and that it is above.
        seed: of the exchanges.

    Returns:
        The estimate and the bounds, [...]. With too few rounds for `tail`, a bound is the ratio of
        the extremes.
    """
    signs = exchanges(first.shape[-1], seed)

    def least(first: Tensor, second: Tensor, share: float) -> Tensor:
        """The logarithm of the ratio up to which `first` is larger."""
        low = first.amin(dim=-1) - second.amax(dim=-1)
        high = first.amax(dim=-1) - second.amin(dim=-1)
        for _ in range(NUM_HALVINGS):
            middle = (low + high) / 2
            is_low = is_larger(first - middle[..., None], second, differences, share, signs)
            low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
        return (low + high) / 2

    first, second = first.log(), second.log()
    value, low = least(first, second, 1.0), least(first, second, tail)
    high = torch.maximum(-least(second, first, tail), value)  # equal ones differ by rounding
    return value.exp(), low.exp(), high.exp()
