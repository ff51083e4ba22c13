"""The generators that models draw from: whether something was drawn, and the caller's put back as if nothing had been."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from freezer.numerics import comparable, in_double, same_tensors, square_sum

NUM_MORE_CALLS = 16
"""A coin that eager throws falls the same way so often once in 65,536 times."""

ROUNDING = 1e-3
"""Of an output's own size: what differs by less may be the order of a sum."""

PROBLEM = (
    "eager answers the same inputs differently each time, and this always the same: what it drew or read while it was captured "
    "(random, NumPy, the time, a global) was baked in; draw with torch (torch.rand), or make it an input"
)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Put the generators of torch (on the CPU, and on GPUs that are in use), Python and NumPy back. Models draw from them, and
    compilers do.

    NumPy's is kept where something has imported NumPy already.
    """
    numpy = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), numpy.random.get_state() if numpy is not None else None
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(gpus)):
        try:
            yield
        finally:
            random.setstate(of_python)
            if numpy is not None:
                numpy.random.set_state(of_numpy)


def positions() -> Any:
    """Where the generators of torch, Python and NumPy are: elsewhere after something was drawn. A model's own are not seen."""
    numpy = sys.modules.get("numpy")
    of_torch = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
    of_numpy = None if numpy is None else pickle.dumps(numpy.random.get_state())
    return [state.tolist() for state in of_torch], random.getstate(), of_numpy


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
    """What is wrong with a candidate of which an output is the same for ever where eager's is not; None where each draws too.

    Each output is held against its own: one that still draws must not hide another that was baked in.

    Args:
        eager, candidate: the answers to one input set, of as many calls each, all of as many outputs; at least two.
        ask: asks the candidate once more.
    """
    suspects = {
        index
        for index, (of_eager, mine) in enumerate(zip(zip(*eager, strict=True), zip(*candidate, strict=True), strict=True))
        if any(_apart(of_eager[0], other) for other in of_eager[1:]) and all(same_tensors(mine[0], other) for other in mine[1:])
    }
    for _ in range(NUM_MORE_CALLS):
        if not suspects:
            return None
        answer = ask()
        suspects = {index for index in suspects if same_tensors(candidate[0][index], answer[index])}
    return PROBLEM if suspects else None


def _apart(one: Tensor, other: Tensor) -> bool:
    """Whether two answers are apart by more than rounding."""
    if one.shape != other.shape or not comparable(one):
        return not torch.equal(one, other)
    a, b = in_double(one).nan_to_num(), in_double(other).nan_to_num()
    return square_sum(a - b) > ROUNDING**2 * square_sum(a)
