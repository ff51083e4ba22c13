"""Tensors in memory: bytes, addresses and sizes; as the comparison takes them; the tensors of
programs and results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from freezer.compare import Values
from freezer.errors import CaptureError
from freezer.runtime.arrays import BFLOAT16, Array
from freezer.spec import OutputSpec, OutputStructure, PlainValue

HALVES = (torch.float16, torch.bfloat16)

_NUMPY_FLOATS = (torch.float16, torch.float32, torch.float64)


def values_of(tensor: Tensor) -> Values:
    """The values of a tensor on the CPU; bfloat16 and other dtypes that numpy lacks are widened."""
    held = tensor
    if held.dtype is torch.complex32:
        held = held.to(torch.complex64)
    elif held.is_floating_point() and held.dtype not in _NUMPY_FLOATS:
        held = held.to(torch.float32)
    return Values(
        array=held.numpy(force=True),
        dtype=dtype_name(tensor.dtype),
    )


def to_array(tensor: Tensor) -> Array:
    """A tensor as an array, on its memory if that is on the CPU; bfloat16 as BFLOAT16."""
    if tensor.dtype is torch.bfloat16:
        return to_array(tensor.detach().view(torch.int16)).view(BFLOAT16)
    array: Array = tensor.numpy(force=True)
    return array


def to_tensor(array: Array) -> Tensor:
    """An array as a tensor on its memory, which must be writable."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


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


OUTPUTS = "CP-OUTPUTS"
"""Code of results that cannot be frozen."""


def dense_parts(value: object) -> list[Tensor]:
    """Dense tensors of a state dict's value in a fixed order; empty for values without tensors.

    A dense tensor is its only part. A sparse tensor has indices and values; a quantized one
    integers, scales and zero points; packed weights (a tuple in the state dict of a quantized
    layer) the tensors in it.
    """
    if isinstance(value, tuple | list):
        parts: list[Tensor] = []
        for part in value:
            parts += dense_parts(part)
        return parts
    if not isinstance(value, Tensor):
        return []
    tensor = value.detach()
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        return [whole.indices(), whole.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if not tensor.is_quantized:
        return [tensor]
    integers = tensor.int_repr()
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        pair = [tensor.q_scale(), tensor.q_zero_point()]
        return [integers, torch.tensor(pair, dtype=torch.float64)]
    return [integers, tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]


def bytes_of(tensor: Tensor) -> Tensor:
    """Bytes of a dense tensor in the order of its elements."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def same_bytes(
    first: object,
    second: object,
) -> bool:
    """Whether two values have the same tensors, bit for bit."""
    parts, others = dense_parts(first), dense_parts(second)
    return len(parts) == len(others) and all(
        (one.shape, one.dtype) == (other.shape, other.dtype)
        and torch.equal(bytes_of(one), bytes_of(other))
        for one, other in zip(parts, others, strict=True)
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


def addresses_of(tensors: Iterable[Tensor]) -> set[int]:
    """Addresses of the tensors that have storage."""
    return {storage[0] for storage in map(storage_of, tensors) if storage is not None}


def identity_of(tensor: Tensor) -> object:
    """Key that is equal for tensors on the same memory."""
    storage = storage_of(tensor)
    if storage is None:
        return id(tensor)
    return storage, tensor.storage_offset(), tensor.shape, tensor.dtype


def tensors_bytes(tensors: Iterable[Tensor]) -> int:
    """Total size of tensors in bytes; those on the same memory count once."""
    sizes = {identity_of(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}
    return sum(sizes.values())


def named_tensors(module: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers of a module by name, tied ones under each name."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def program_tensors(program: torch.nn.Module | torch.export.ExportedProgram) -> list[Tensor]:
    """Parameters and buffers of a module; for an ExportedProgram also its lifted constants."""
    if isinstance(program, torch.nn.Module):
        return [tensor for _, tensor in named_tensors(program)]
    values = (*program.state_dict.values(), *program.constants.values())
    return [value for value in values if isinstance(value, Tensor)]


def program_bytes(program: torch.nn.Module | torch.export.ExportedProgram) -> int:
    """Total size of a captured program's tensors in bytes."""
    return tensors_bytes(program_tensors(program))


def dtypes_of(tensors: Iterable[Tensor]) -> set[str]:
    """Dtypes that weights among tensors may be packed in, for example `float32`; integers count
    only as matrices.
    """
    packed = (tensor for tensor in tensors if tensor.dim() > 1 or comparable(tensor))
    return {dtype_name(tensor.dtype) for tensor in packed}


def program_dtypes(program: torch.export.ExportedProgram) -> set[str]:
    """Dtypes that an exported program's weights may be packed in: its own, and those of its
    floating-point computations.
    """
    tensors = program_tensors(program)
    for module in program.graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            values = tensors_in(node.meta.get("val"))
            tensors += [value for value in values if value.is_floating_point()]
    return dtypes_of(tensors)


def cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors, for a call that may write into its inputs."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def tensors_in(value: object) -> list[Tensor]:
    """The tensors in arguments or results of an operation."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in specs: `float32`."""
    return str(dtype).removeprefix("torch.")


def flatten(result: object) -> tuple[OutputStructure, list[Tensor]]:
    """Structure of a result, and its tensors in order.

    Raises:
        CaptureError: a part is not a tensor, a plain constant, or a tuple, list, dict, dataclass or
            ModelOutput of those.
    """
    leaves: list[Tensor] = []
    return _flatten(result, leaves, "output"), leaves


def leaves_of(result: object) -> list[Tensor]:
    """The tensors of a result, in order."""
    if isinstance(result, Tensor):
        return [result]
    return flatten(result)[1]


def _flatten(
    value: object,
    leaves: list[Tensor],
    path: str,
) -> OutputStructure:
    if isinstance(value, Tensor):
        leaves.append(value)
        return OutputStructure(kind="tensor")
    if isinstance(value, PlainValue):
        return OutputStructure(kind="constant", value=value)
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    fields = _named_fields(value, path)
    if fields is not None:
        parts = fields
    elif isinstance(value, tuple | list):
        parts = {str(index): part for index, part in enumerate(value)}
    else:
        remedy = "return those from forward"
        if kind.__name__.endswith("Cache"):  # of transformers, which return it by default
            remedy = "pass the input use_cache=False (`use_cache: {value: false}`)"
        raise CaptureError(
            f"{path} is a {name}; expected tensors, constants, or tuples, lists, dicts and"
            f" dataclasses of them: {remedy}",
            code=OUTPUTS,
        )
    items = tuple(_flatten(part, leaves, f"{path}.{key}") for key, part in parts.items())
    if fields is None:
        return OutputStructure(kind="tuple" if isinstance(value, tuple) else "list", items=items)
    keys = tuple(fields)
    if kind is dict:
        return OutputStructure(kind="dict", keys=keys, items=items)
    named: Literal["named", "namedtuple"]
    named = "namedtuple" if isinstance(value, tuple) else "named"
    return OutputStructure(kind=named, keys=keys, items=items, type_name=name)


def _named_fields(
    value: object,
    path: str,
) -> dict[str, object] | None:
    """The fields of a dict, ModelOutput, dataclass or named tuple, in order; None for anything
    else.
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise CaptureError(
                    f"{path} has the key {key!r}; expected texts as keys: str({key!r})",
                    code=OUTPUTS,
                )
        return dict(value)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    return None


def output_specs(
    structure: OutputStructure,
    leaves: Sequence[Tensor],
) -> tuple[OutputSpec, ...]:
    """Names, dtypes and ranks of the tensors of a result."""
    return tuple(
        OutputSpec(name=name, dtype=dtype_name(leaf.dtype), rank=leaf.dim())
        for name, leaf in zip(_names(structure, ""), leaves, strict=True)
    )


def _names(
    structure: OutputStructure,
    prefix: str,
) -> Iterator[str]:
    if structure.kind == "tensor":
        yield prefix or "output"
    elif structure.kind != "constant":
        indices = map(str, range(len(structure.items)))
        for key, item in zip(structure.keys or indices, structure.items, strict=True):
            path = f"{prefix}.{key}" if prefix else key
            yield from _names(item, path)
