"""Tensors in memory: bytes, addresses and sizes; the tensors of programs and results."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from freezer.errors import CaptureError
from freezer.spec import OutputSpec, OutputStructure


def dense_parts(value: Any) -> Iterator[Tensor]:
    """Dense tensors of a state dict's value in a fixed order; none for values without tensors.

    A dense tensor is its only part. A sparse tensor has indices and values; a quantized one
    integers, scales and zero points; packed weights (a tuple in the state dict of a quantized
    layer) the tensors in it.
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
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def memory_of(tensor: Tensor) -> memoryview:
    """Buffer over the bytes of `bytes_of`. Unlike `Tensor.numpy`, it leaves the storage
    resizable.
    """
    return np.from_dlpack(tensor).data


def same_bytes(one: Any, other: Any) -> bool:
    """Whether two values have the same tensors, bit for bit."""
    ones, others = list(dense_parts(one)), list(dense_parts(other))
    return len(ones) == len(others) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(bytes_of(a), bytes_of(b))
        for a, b in zip(ones, others, strict=True)
    )


def storage_of(tensor: Tensor) -> tuple[int, int] | None:
    """Address and size in bytes of a tensor's storage; None if it is empty, or the layout has no
    storage.
    """
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    return (storage.data_ptr(), storage.nbytes()) if storage.nbytes() else None


def address_of(tensor: Tensor) -> int | None:
    """Address of a tensor's storage; None as for `storage_of`."""
    storage = storage_of(tensor)
    return None if storage is None else storage[0]


def addresses_of(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Addresses of the tensors that have storage."""
    addresses = map(address_of, tensors)
    return frozenset(address for address in addresses if address is not None)


def identity_of(tensor: Tensor) -> object:
    """Key that is equal for tensors on the same memory."""
    storage = storage_of(tensor)
    if storage is None:
        return id(tensor)
    return storage, tensor.storage_offset(), tensor.shape, tensor.dtype


def tensors_bytes(tensors: Iterable[Tensor]) -> int:
    """Total size of tensors in bytes."""
    return sum({identity_of(tensor): tensor.nbytes for tensor in tensors}.values())


def named_tensors(module: Any) -> list[tuple[str, Tensor]]:
    """Parameters and buffers of a module by name, tied ones under each name."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def program_tensors(program: Any) -> list[Tensor]:
    """Parameters and buffers of a module; for an ExportedProgram also its lifted constants."""
    if isinstance(program, torch.export.ExportedProgram):
        values = (*program.state_dict.values(), *program.constants.values())
        return [value for value in values if isinstance(value, Tensor)]
    return [tensor for _, tensor in named_tensors(program)]


def program_bytes(program: Any) -> int:
    """Total size of a captured program's tensors in bytes."""
    return tensors_bytes(program_tensors(program))


def dtypes_of(tensors: Iterable[Tensor]) -> frozenset[str]:
    """Dtypes that weights among tensors may be packed in, for example `float32`; integers count
    only as matrices.
    """
    numbers = (tensor for tensor in tensors if _is_floating(tensor) or tensor.dim() > 1)
    return frozenset(dtype_name(tensor.dtype) for tensor in numbers)


def program_dtypes(program: torch.export.ExportedProgram) -> frozenset[str]:
    """Dtypes that an exported program's weights may be packed in: its own, and those of its
    floating-point computations.
    """
    computed: list[object] = []
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            computed += [node.meta.get("val") for node in module.graph.nodes]
    leaves = pytree.tree_leaves(computed)
    floating = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return dtypes_of((*program_tensors(program), *floating))


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in specs: `float32`."""
    return str(dtype).removeprefix("torch.")


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def flatten(result: Any) -> tuple[OutputStructure, list[Tensor]]:
    """Structure of a result, and its tensors in order.

    Raises:
        CaptureError: a part is not a tensor, a plain constant, or a tuple, list, dict, dataclass or
            ModelOutput of those.
    """
    leaves: list[Tensor] = []
    return _flatten(result, leaves, "output"), leaves


def leaves_of(result: Any) -> list[Tensor]:
    """The tensors of a result, in order; faster for the common ones than `flatten`."""
    if isinstance(result, Tensor):
        return [result]
    if type(result) in (tuple, list) and all(isinstance(item, Tensor) for item in result):
        return list(result)
    return flatten(result)[1]


def _flatten(value: object, leaves: list[Tensor], path: str) -> OutputStructure:
    if isinstance(value, Tensor):
        leaves.append(value)
        return OutputStructure(kind="tensor")
    if value is None or isinstance(value, bool | int | float | str):
        return OutputStructure(kind="constant", value=value)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    fields = _named_fields(value, path)
    parts: Iterable[tuple[str, object]] = fields.items() if fields is not None else ()
    if fields is None and isinstance(value, tuple | list):
        parts = ((str(index), part) for index, part in enumerate(value))
    elif fields is None:
        raise CaptureError(
            f"{path} is a {name}; expected tensors, constants, or tuples, lists, dicts and"
            " dataclasses of them: return those from forward"
        )
    items = tuple(_flatten(part, leaves, f"{path}.{key}") for key, part in parts)
    if fields is None:
        return OutputStructure(kind="tuple" if isinstance(value, tuple) else "list", items=items)
    keys = tuple(fields)
    if type(value) is dict:
        return OutputStructure(kind="dict", keys=keys, items=items)
    kind = "namedtuple" if isinstance(value, tuple) else "named"
    return OutputStructure(kind=kind, keys=keys, items=items, type_name=name)  # type: ignore[arg-type]


def _named_fields(value: object, path: str) -> dict[str, object] | None:
    """The fields of a dict, ModelOutput, dataclass or named tuple, in order; None for anything
    else.
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise CaptureError(
                    f"{path} has the key {key!r} of type {type(key).__name__}; expected str keys"
                )
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    return None


def output_specs(structure: OutputStructure, leaves: Sequence[Tensor]) -> tuple[OutputSpec, ...]:
    """Names, dtypes and ranks of the tensors of a result."""
    return tuple(
        OutputSpec(name=name, dtype=dtype_name(leaf.dtype), rank=leaf.dim())
        for name, leaf in zip(_names(structure, ""), leaves, strict=True)
    )


def _names(structure: OutputStructure, prefix: str) -> Iterator[str]:
    if structure.kind == "tensor":
        yield prefix or "output"
    elif structure.kind != "constant":
        keys = structure.keys or map(str, range(len(structure.items)))
        for key, item in zip(keys, structure.items, strict=True):
            yield from _names(item, f"{prefix}.{key}" if prefix else key)
