"""Bytes of tensors, including sparse and quantized ones, for digests and exact comparison."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def dense_parts(value: Any) -> Iterator[Tensor]:
    """Dense tensors of a state dict's value in a fixed order; none for values without tensors.

    A dense tensor is its only part. A sparse tensor has indices and values; a quantized one integers, scales and zero points;
    packed weights (a tuple in the state dict of a quantized layer) the tensors in it.
    """
    if isinstance(value, tuple | list):
        for item in value:
            yield from dense_parts(item)
    elif not isinstance(value, Tensor):
        return
    elif value.layout is torch.sparse_coo:
        whole = value.detach().coalesce()
        yield from (whole.indices(), whole.values())
    elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (value.crow_indices(), value.col_indices(), value.detach().values())
    elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (value.ccol_indices(), value.row_indices(), value.detach().values())
    elif value.is_quantized:
        yield value.int_repr()
        if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            yield torch.tensor([value.q_scale(), value.q_zero_point()], dtype=torch.float64)
        else:
            yield from (value.q_per_channel_scales(), value.q_per_channel_zero_points())
    else:
        yield value.detach()


def bytes_of(tensor: Tensor) -> Tensor:
    """Bytes of a dense tensor in the order of its elements."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def memory_of(tensor: Tensor) -> Any:
    """Buffer over a contiguous tensor on the CPU, without NumPy; it must not outlive the tensor."""
    return (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""


def same_bytes(one: Any, other: Any) -> bool:
    """Whether two values have the same tensors, bit for bit."""
    ones, others = list(dense_parts(one)), list(dense_parts(other))
    return len(ones) == len(others) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(bytes_of(a), bytes_of(b))
        for a, b in zip(ones, others, strict=True)
    )
