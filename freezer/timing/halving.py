"""Successive halving: stop timing an entrant that is clearly slower than a rival, and give its time
to the others.

A rival's block and the entrant's own run in the same rounds. A one-sided t-test of the logarithms
of their ratios, block median by block median, is made at 5, 10, 20, 40, ... undisturbed rounds. All
tests of a judge together stop an entrant that is as fast as its rivals with a probability of at
most FALSE_STOPS: half of it is spent at the first look, a quarter at the second, and so on, each
divided by the number of pairs (Bonferroni), so that it does not matter which rival looks fastest.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Collection, Mapping, Sequence

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
        logs: dict[str, list[float]] = {}
        for name in rounds[-1]:
            medians = [statistics.median(blocks[name]) for blocks in rounds]
            logs[name] = [math.log(max(median, 1e-9)) for median in medians]
        stopped: set[str] = set()
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
