"""Whether a model draws by chance, and whether a candidate of it still does.

A model that draws with Python's or NumPy's generators, reads a clock, or counts in a global answers the same inputs differently, so
the gate allows what is between two answers, and a constant that a capture kept would pass. Here it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from freezer.generators import positions

NUM_MORE_CALLS = 16
"""A coin that eager throws falls the same way so often once in 65,536 times."""

ROUNDING = 1e-3
"""Of an output's own size: what differs by less may be the order of a sum."""

PROBLEM = (
    "eager answers the same inputs differently each time, and this always the same: what it drew or read while it was captured "
    "(random, NumPy, the time, a global) was baked in; draw with torch (torch.rand), or make it an input"
)


def same_each_time(ask_again: Callable[[], bool]) -> bool:
    """Whether a model answers the same each time that it is asked. Where it draws, a few values may come out the same by chance.

    Args:
        ask_again: asks once more what was asked before, and returns whether the answer is the same.
    """
    before = positions()
    if not ask_again():
        return False
    return positions() == before or all(ask_again() for _ in range(NUM_MORE_CALLS))


def baked_in(
    eager: Sequence[Sequence[Tensor]], candidate: Sequence[Sequence[Tensor]], ask: Callable[[], list[Tensor]]
) -> str | None:
    """What is wrong with a candidate that answers the same for ever where eager does not; None where it draws too.

    Args:
        eager, candidate: the answers to one input set, of as many calls each; at least two.
        ask: asks the candidate once more.
    """
    differs = any(_apart(one, other) for answer in eager[1:] for one, other in zip(eager[0], answer, strict=True))
    if not differs or not all(_equal(candidate[0], answer) for answer in candidate[1:]):
        return None
    return PROBLEM if all(_equal(candidate[0], ask()) for _ in range(NUM_MORE_CALLS)) else None


def _apart(one: Tensor, other: Tensor) -> bool:
    """Whether two answers are apart by more than rounding."""
    if one.shape != other.shape or not (one.is_floating_point() or one.is_complex()):
        return not torch.equal(one, other)
    wide = torch.complex128 if one.is_complex() else torch.float64
    a, b = one.to(wide).nan_to_num(), other.to(wide).nan_to_num()
    return bool((a - b).abs().square().sum() > ROUNDING**2 * a.abs().square().sum())


def _equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True)
    )
