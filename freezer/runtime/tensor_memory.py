"""Addresses and sizes of tensors in memory; tied tensors are counted once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def storage_of(tensor: Tensor) -> tuple[int, int] | None:
    """Address and size in bytes of a tensor's storage; None if it is empty, or the layout has no storage."""
    try:
        storage = tensor.untyped_storage()
        return (storage.data_ptr(), storage.nbytes()) if storage.nbytes() else None
    except (NotImplementedError, RuntimeError):
        return None


def address_of(tensor: Tensor) -> int | None:
    """Address of a tensor's storage; None as for `storage_of`."""
    storage = storage_of(tensor)
    return None if storage is None else storage[0]


def addresses_of(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Addresses of the tensors that have storage."""
    return frozenset(address for tensor in tensors if (address := address_of(tensor)) is not None)


def identity_of(tensor: Tensor) -> object:
    """Key that is equal for tensors on the same memory."""
    storage = storage_of(tensor)
    return id(tensor) if storage is None else (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.dtype)


def tensors_bytes(tensors: Iterable[Tensor]) -> int:
    """Total size of tensors in bytes."""
    different = {identity_of(tensor): tensor for tensor in tensors}.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in different)


def named_tensors(module: Any) -> list[tuple[str, Tensor]]:
    """Parameters and buffers of a module by name, tied ones under each name."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def program_tensors(program: Any) -> list[Tensor]:
    """Parameters and buffers of a module; for an ExportedProgram also its lifted constants."""
    if isinstance(program, torch.export.ExportedProgram):
        return [value for value in (*program.state_dict.values(), *program.constants.values()) if isinstance(value, Tensor)]
    return [tensor for _, tensor in named_tensors(program)]


def program_bytes(program: Any) -> int:
    """Total size of a captured program's tensors in bytes."""
    return tensors_bytes(program_tensors(program))


def dtypes_of(tensors: Iterable[Tensor]) -> frozenset[str]:
    """Dtypes that weights among tensors may be packed in, for example `float32`; integers count only as matrices."""
    found = (tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex() or tensor.dim() > 1)
    return frozenset(str(tensor.dtype).removeprefix("torch.") for tensor in found)


def program_dtypes(program: torch.export.ExportedProgram) -> frozenset[str]:
    """Dtypes that an exported program's weights may be packed in: its own, and those of its floating-point computations."""
    computed: list[Tensor] = []
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            computed += [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    return dtypes_of((*program_tensors(program), *(tensor for tensor in computed if tensor.is_floating_point())))
