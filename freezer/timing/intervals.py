"""Confidence intervals of the ratio of two entrants' latencies, over rounds with a block of each;
and successive halving, which stops timing what is clearly slower.

The order of the blocks in a round is random. If one entrant's figures are divided by the true
ratio, the two blocks of any round could be exchanged as well: each exchange changes the sign of
their difference, and the signs that were measured are as probable as any others. The interval
consists of the ratios that this permutation test does not reject (Fisher 1935; Maritz 1979). It
holds for every distribution of the noise, also if the noise of a round depends on that of others.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from freezer.runtime.input_sets import Draws

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


logger = logging.getLogger("coldpress")

FALSE_STOPS = 0.01
"""Largest probability that a judge stops any entrant that is as fast as its rivals."""

FIRST_LOOK = 5
"""Undisturbed rounds before the first test. Each further one follows after twice as many."""

Rivals = Mapping[str, Collection[str]]
"""The entrants that may be stopped, each with those of which one suffices to beat it.

Others are timed to the end.
"""

Round = Mapping[str, Sequence[float]]
"""Latencies of one round by entrant."""


class Halving:
    """Decides which entrants are timed further.

    Args:
        rivals: rivals of the entrants that may be stopped.
    """

    def __init__(self, rivals: Rivals) -> None:
        self._pairs = [(name, rival) for name, others in rivals.items() for rival in others]
        self._next_look = FIRST_LOOK
        self._level = FALSE_STOPS

    def beaten(self, rounds: Sequence[Round]) -> set[str]:
        """The entrants to stop now.

        Args:
            rounds: undisturbed rounds. Those in the last round are in all of them.
        """
        if not self._pairs or len(rounds) < self._next_look:
            return set()
        while self._next_look <= len(rounds):
            self._next_look *= 2
            self._level /= 2
        logs = {}
        for name in rounds[-1]:
            medians = [statistics.median(blocks[name]) for blocks in rounds]
            logs[name] = [math.log(max(median, 1e-9)) for median in medians]
        stopped = set()
        for name, rival in self._pairs:
            if name in stopped or name not in logs or rival not in logs:
                continue
            if slower_p(logs[name], logs[rival]) < self._level / len(self._pairs):
                message = "stopped timing %s after %d rounds: slower than %s"
                logger.info(message, name, len(rounds), rival)
                stopped.add(name)
        return stopped


def slower_p(latencies: Sequence[float], rivals: Sequence[float]) -> float:
    """One-sided p-value of a paired t-test: `latencies` do not exceed `rivals`."""
    differences = [a - b for a, b in zip(latencies, rivals, strict=True)]
    mean = statistics.fmean(differences)
    spread = statistics.stdev(differences)
    if mean <= 0:
        return 1.0
    if spread == 0:
        return 0.0
    freedom = len(differences) - 1
    t = mean / spread * math.sqrt(len(differences))
    normal = math.sqrt(freedom * math.log1p(t * t / freedom))  # about normal (Wallace 1959)
    return statistics.NormalDist().cdf(-normal * (8 * freedom + 1) / (8 * freedom + 3))
