"""Giving back the memory of weights that nobody needs any more."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from freezer.tensor_memory import address_of, program_tensors, tensors_bytes

LARGE_BYTES = 500_000_000
"""Above this a model that only a build needs is worth discarding while it is built."""


def give_back(tensors: Iterable[Tensor], in_use: Iterable[Tensor] = ()) -> int:
    """Free the memory of tensors; returns the number of bytes.

    It is freed whoever still refers to the tensors: they must never be read again. Of memory that cannot be (of a mapped file, or
    that numpy has seen) these tensors let go, and it is gone with the last other that refers to it. What is shared with a tensor
    that is in use is kept.
    """
    kept = {address_of(tensor) for tensor in in_use}
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


def share(ones: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether some memory is common to tensors and to others."""
    common = {address_of(tensor) for tensor in ones} & {address_of(tensor) for tensor in others}
    return bool(common - {None})


def is_large(module: nn.Module) -> bool:
    """Whether a module's parameters and buffers take more than LARGE_BYTES."""
    return tensors_bytes(program_tensors(module)) > LARGE_BYTES
