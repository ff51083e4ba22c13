"""The weights of a model: their digest, their size, and giving their memory back."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterable

from torch import Tensor, nn

from freezer.runtime.tensors import (
    address_of,
    addresses_of,
    bytes_of,
    dense_parts,
    memory_of,
    program_tensors,
    tensors_bytes,
)

LARGE_BYTES = 500_000_000
"""A model above this size that only a build needs is discarded while it is built."""


def weights_digest(model: nn.Module) -> str:
    """`sha256:` over names, dtypes, shapes and bytes of all parameters, buffers and packed weights,
    ordered by name.
    """
    digest = hashlib.sha256()
    tensors = dict(model.named_buffers())  # state_dict omits those that are not persistent
    tensors.update(model.state_dict())
    for name, value in sorted(tensors.items()):
        for tensor in dense_parts(value):
            shape = tuple(tensor.shape)
            header = f"{name}\0{tensor.dtype}\0{shape}\0"
            digest.update(header.encode())
            if tensor.numel():
                data = bytes_of(tensor)
                digest.update(memory_of(data))
    return f"sha256:{digest.hexdigest()}"


def is_large(module: nn.Module) -> bool:
    """Whether a module's parameters and buffers take more than LARGE_BYTES."""
    return tensors_bytes(program_tensors(module)) > LARGE_BYTES


def free_tensors(tensors: Iterable[Tensor], in_use: Iterable[Tensor] = ()) -> int:
    """Free the memory of tensors; return the number of bytes.

    The tensors must never be read again, even if others still refer to them. Memory that cannot be
    resized (a mapped file, or shared with NumPy) is only dereferenced. Memory shared with a tensor
    of `in_use` is kept.
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


def clear_frames(error: BaseException, handled: BaseException | None = None) -> None:
    """Clear the frames of an error and of its causes, whose local variables keep graphs and weights
    alive. It prints as before.

    Args:
        error: an error whose functions have ended.
        handled: an error that was already being handled before; it is left alone.
    """
    waiting: list[BaseException | None] = [error]
    seen = {id(handled)}
    while waiting:
        cause = waiting.pop()
        if cause is None:
            continue
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        traceback.clear_frames(cause.__traceback__)
        waiting += [cause.__cause__, cause.__context__]
        if isinstance(cause, BaseExceptionGroup):
            waiting += cause.exceptions


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's own tensors by path, not copied: those of `state_dict`, and the buffers that it
    omits.
    """
    tensors = dict(model.named_buffers())
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            tensors[name] = value
    return tensors
