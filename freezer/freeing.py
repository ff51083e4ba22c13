"""Giving back the memory of weights that nobody needs any more."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

LARGE_BYTES = 500_000_000
"""Above this a model that only a build needs is worth discarding while it is built."""


def address_of(tensor: Tensor) -> int | None:
    """Where a tensor's memory begins; None where it has none, or is of a layout without such."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr() if storage.nbytes() else None
    except (NotImplementedError, RuntimeError):
        return None


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


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers of a module; of tied ones each."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return [tensor for _, tensor in named]


def share(ones: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether some memory is common to tensors and to others."""
    return not ({address_of(tensor) for tensor in ones} & {address_of(tensor) for tensor in others} <= {None})


def is_large(module: nn.Module) -> bool:
    """Whether a module's parameters and buffers take more than LARGE_BYTES."""
    sizes = {address_of(tensor) or id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors_of(module)}
    return sum(sizes.values()) > LARGE_BYTES
