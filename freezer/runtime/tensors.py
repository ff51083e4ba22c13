r"""Tensors in memory and in files: bytes, addresses, .safetensors files, and an artifact's own
outputs.

safetensors has no complex128: such a tensor is stored as float64 with a last dim of 2 (real,
imaginary), and listed in the file's
metadata: `{"complex128": "[\"0/x\"]"}`.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree

from freezer.artifact import OWN_OUTPUTS
from freezer.spec import COMPLEX128, READ_ERRORS, as_sets, unreadable


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
    return (
        tensor.detach()
        .cpu()
        .resolve_conj()
        .resolve_neg()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
    )


def memory_of(tensor: Tensor) -> Any:
    """Buffer over a contiguous tensor on the CPU, without NumPy; it must not outlive the tensor."""
    return (
        (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""
    )


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
    return (
        id(tensor)
        if storage is None
        else (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.dtype)
    )


def tensors_bytes(tensors: Iterable[Tensor]) -> int:
    """Total size of tensors in bytes."""
    different = {identity_of(tensor): tensor for tensor in tensors}.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in different)


def named_tensors(module: Any) -> list[tuple[str, Tensor]]:
    """Parameters and buffers of a module by name, tied ones under each name."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def program_tensors(program: Any) -> list[Tensor]:
    """Parameters and buffers of a module; for an ExportedProgram also its lifted constants."""
    if isinstance(program, torch.export.ExportedProgram):
        return [
            value
            for value in (*program.state_dict.values(), *program.constants.values())
            if isinstance(value, Tensor)
        ]
    return [tensor for _, tensor in named_tensors(program)]


def program_bytes(program: Any) -> int:
    """Total size of a captured program's tensors in bytes."""
    return tensors_bytes(program_tensors(program))


def dtypes_of(tensors: Iterable[Tensor]) -> frozenset[str]:
    """Dtypes that weights among tensors may be packed in, for example `float32`; integers count
    only as matrices.
    """
    found = (
        tensor
        for tensor in tensors
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dim() > 1
    )
    return frozenset(str(tensor.dtype).removeprefix("torch.") for tensor in found)


def program_dtypes(program: torch.export.ExportedProgram) -> frozenset[str]:
    """Dtypes that an exported program's weights may be packed in: its own, and those of its
    floating-point computations.
    """
    computed: list[Tensor] = []
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            computed += [
                value
                for value in pytree.tree_leaves(node.meta.get("val"))
                if isinstance(value, Tensor)
            ]
    return dtypes_of(
        (*program_tensors(program), *(tensor for tensor in computed if tensor.is_floating_point()))
    )


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a file for `load_tensors`. The tensors may share memory and have any strides."""
    pairs = [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]
    stored = {
        name: tensor.detach()
        .cpu()
        .resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    stored |= {name: torch.view_as_real(stored[name]) for name in pairs}
    save_file(stored, path, metadata={COMPLEX128: json.dumps(pairs)} if pairs else None)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name.

    Raises:
        SafetensorError, OSError, ValueError: it cannot be read.
    """
    with safe_open(path, framework="pt") as file:
        pairs = json.loads((file.metadata() or {}).get(COMPLEX128, "[]"))
        tensors: dict[str, Tensor] = {
            name: file.get_tensor(name)
            for name in file.keys()  # noqa: SIM118  # not a mapping
        }
    # Copy: the file aligns to 8 bytes; torch reads complex128 by 16 bytes, and would crash.
    return {
        name: torch.view_as_complex(tensor.clone()) if name in pairs else tensor
        for name, tensor in tensors.items()
    }


def read_samples(path: Path) -> list[dict[str, Tensor]]:
    """The input sets of a .safetensors or .npz file.

    Keys are input names (one set), or `<index>/<name>` with indices from 0 (several sets).

    Raises:
        SpecError: the file cannot be read, has another format, or its keys do not form sets; code
            CP-SAMPLES.
    """
    try:
        flat = _read_tensors(path)
    except READ_ERRORS as error:
        raise unreadable(path, error) from error
    return as_sets(path, flat)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        try:
            return load_tensors(path)
        except SafetensorError as error:
            raise ValueError(str(error)) from error
    if path.suffix == ".npz":
        import numpy as np

        with (
            path.open("rb") as file,
            np.load(file, allow_pickle=False) as arrays,
        ):  # np.load would leak its own for a damaged file
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    raise ValueError(f"suffix {path.suffix!r} is unknown")


OWN_OUTPUT_BYTES = 8 * 1024 * 1024
"""Bound of the file's outputs, of which the smallest are kept."""


def kept_of(names: Sequence[str], leaves: Sequence[Tensor]) -> dict[str, Tensor]:
    """Outputs of one call by name, without those that exceed the bound alone."""
    return {
        name: leaf
        for name, leaf in zip(names, leaves, strict=True)
        if leaf.nbytes <= OWN_OUTPUT_BYTES
    }


def write_own_outputs(answers: Sequence[Mapping[str, Tensor]], folder: Path) -> None:
    """Write tensors `<set>/<output>` within the bound.

    Args:
        answers: outputs by name of each golden set, in order.
        folder: of the artifact.
    """
    tensors = {
        f"{index}/{name}": tensor
        for index, outputs in enumerate(answers)
        for name, tensor in outputs.items()
    }
    path = folder / OWN_OUTPUTS
    path.parent.mkdir(exist_ok=True)
    kept, room = dict[str, Tensor](), OWN_OUTPUT_BYTES
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].nbytes):
        room -= tensor.nbytes
        if room >= 0:
            kept[name] = tensor
    save_tensors(kept, path)
