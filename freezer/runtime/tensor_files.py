r"""Read and write tensors of every supported dtype in .safetensors files; read samples.

safetensors has no complex128: such a tensor is stored as float64 with a last dim of 2 (real, imaginary), and listed in the file's
metadata: `{"complex128": "[\"0/x\"]"}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from freezer.errors import MissingDependencyError
from freezer.runtime.tensor_bytes import memory_of
from freezer.spec.sample_headers import COMPLEX128, READ_ERRORS, as_sets, unreadable


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a file for `load_tensors`. The tensors may share memory and have any strides."""
    pairs = [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]
    stored = {
        name: _plain(torch.view_as_real(tensor.resolve_conj()) if name in pairs else tensor) for name, tensor in tensors.items()
    }
    parts = {name: _part(tensor) for name, tensor in stored.items()}
    safetensors.serialize_file(parts, path, metadata={COMPLEX128: json.dumps(pairs)} if pairs else None)


def _plain(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _part(tensor: Tensor) -> Any:
    """Argument for safetensors' core; safetensors.torch would need NumPy."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    if hasattr(safetensors, "TensorSpec"):
        return safetensors.TensorSpec(dtype=dtype, shape=shape, data_ptr=tensor.data_ptr(), data_len=tensor.nbytes)
    return {"dtype": dtype, "shape": shape, "data": bytes(memory_of(tensor))}


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name.

    Raises:
        SafetensorError, OSError, ValueError: it cannot be read.
    """
    with safe_open(path, framework="pt") as file:
        pairs = json.loads((file.metadata() or {}).get(COMPLEX128, "[]"))
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
    # Copy: the file aligns to 8 bytes; torch reads complex128 by 16 bytes, and would crash.
    return {name: torch.view_as_complex(tensor.clone()) if name in pairs else tensor for name, tensor in tensors.items()}


def read_samples(path: Path) -> list[dict[str, Tensor]]:
    """The input sets of a .safetensors or .npz file.

    Keys are input names (one set), or `<index>/<name>` with indices from 0 (several sets).

    Raises:
        SpecError: the file cannot be read, has another format, or its keys do not form sets; code CP-SAMPLES.
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
        try:
            import numpy as np
        except ImportError:
            raise MissingDependencyError("reading .npz needs numpy; pip install numpy") from None
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:  # np.load would leak its own for a damaged file
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    raise ValueError(f"suffix {path.suffix!r} is unknown")
