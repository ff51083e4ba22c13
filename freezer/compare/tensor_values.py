"""Torch's tensors as the comparison takes them, and what the build side asks of tensors alone."""

from __future__ import annotations

import torch
from torch import Tensor

from freezer.compare.outputs import Values

HALVES = (torch.float16, torch.bfloat16)

_NUMPY_FLOATS = (torch.float16, torch.float32, torch.float64)


def values_of(tensor: Tensor) -> Values:
    """The values of a tensor on the CPU; bfloat16 and other dtypes that numpy lacks are widened."""
    held = tensor.detach().resolve_conj().resolve_neg()
    if held.dtype is torch.complex32:
        held = held.to(torch.complex64)
    elif held.is_floating_point() and held.dtype not in _NUMPY_FLOATS:
        held = held.to(torch.float32)
    return Values(
        array=held.numpy(),
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def comparable(tensor: Tensor) -> bool:
    """Whether the dtype has rounding errors; integers and bools must be equal."""
    return tensor.is_floating_point() or tensor.is_complex()


def same_tensors(
    one: Tensor,
    other: Tensor,
) -> bool:
    """Whether two tensors have equal shapes, dtypes, layouts and elements; NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout != other.layout:
        return False
    if one.layout is not torch.strided:
        one = one.to_dense()
        other = other.to_dense()
    if torch.equal(one, other):
        return True
    numbers = ~one.isnan()
    return torch.equal(numbers, ~other.isnan()) and torch.equal(one[numbers], other[numbers])


def in_double(tensor: Tensor) -> Tensor:
    """Convert to float64 or complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
