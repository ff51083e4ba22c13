"""Giving back the memory of weights that nobody needs any more."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

from torch import Tensor, nn

from freezer.runtime.tensor_memory import address_of, addresses_of, program_tensors, tensors_bytes

LARGE_BYTES = 500_000_000
"""Above this a model that only a build needs is worth discarding while it is built."""


def give_back(tensors: Iterable[Tensor], in_use: Iterable[Tensor] = ()) -> int:
    """Free the memory of tensors; returns the number of bytes.

    It is freed whoever still refers to the tensors: they must never be read again. Of memory that cannot be (of a mapped file, or
    that numpy has seen) these tensors let go, and it is gone with the last other that refers to it. What is shared with a tensor
    that is in use is kept.
    """
    kept = addresses_of(in_use)
    freed: dict[int, int] = {}
    for tensor in tensors:
        address = address_of(tensor)
        if address is None or address in kept:
            continue
        storage = tensor.untyped_storage()
        freed[address] = storage.nbytes()
        if storage.resizable():
            storage.resize_(0)
        else:
            tensor.data = tensor.data.new_empty(0)
    return sum(freed.values())


def let_go(error: BaseException, handled: BaseException | None = None) -> None:
    """Let go of what the frames of an error hold, and of those that it came from; it prints as before.

    An error that is kept keeps the local variables of every function that it went through: a graph, and the graph's weights.

    Args:
        error: whose functions have ended.
        handled: what was being handled when all this began; it is not touched, being someone else's.
    """
    waiting: list[BaseException | None] = [error]
    seen = {id(handled)}
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        waiting += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]


def is_large(module: nn.Module) -> bool:
    """Whether a module's parameters and buffers take more than LARGE_BYTES."""
    return tensors_bytes(program_tensors(module)) > LARGE_BYTES
