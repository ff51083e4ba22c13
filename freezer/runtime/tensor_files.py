r"""Tensors and arrays in .safetensors and .npz files, and the golden files of an artifact.

Imports no torch, unless tensors are read or written. safetensors has no complex128: such a tensor
is stored as float64 with a last dim of 2 (real, imaginary), and listed in the file's metadata:
`{"complex128": "[\"0/x\"]"}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
from safetensors import safe_open

from freezer.errors import ContractError, IntegrityError, SpecError, first_line
from freezer.runtime.native import Array
from freezer.spec import (
    COMPLEX128,
    Headers,
    InputSpec,
    as_sets,
    match_headers,
    pairs_in,
    read_header,
    unreadable,
)

if TYPE_CHECKING:
    from torch import Tensor


class Shaped(Protocol):
    """A tensor or an array."""

    @property
    def shape(self) -> Sequence[int]:
        """Sizes of the dims."""


_Value = TypeVar("_Value", bound=Shaped)
_Load = Callable[[Path], dict[str, _Value]]
"""Reads a .safetensors file: `load_tensors` or `load_arrays`."""


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, by name.

    Raises:
        SafetensorError, OSError, ValueError: it cannot be read.
    """
    import torch

    tensors: dict[str, Tensor] = {}
    with safe_open(path, framework="pt") as file:
        pairs = pairs_in(file.metadata())
        for name in file.keys():  # noqa: SIM118  # not a mapping
            tensor = file.get_tensor(name)
            if name in pairs:
                # Copy: the file aligns to 8 bytes; torch reads complex128 by 16, and would crash.
                tensor = torch.view_as_complex(tensor.clone())
            tensors[name] = tensor
    return tensors


def load_arrays(path: Path) -> dict[str, Array]:
    """The arrays of a .safetensors file, by name.

    Raises:
        SafetensorError, OSError, ValueError, TypeError: it cannot be read, or has a dtype that
            numpy lacks.
    """
    arrays: dict[str, Array] = {}
    with safe_open(path, framework="np") as file:
        pairs = pairs_in(file.metadata())
        for name in file.keys():  # noqa: SIM118  # not a mapping
            array = file.get_tensor(name)
            if name in pairs:
                numbers = np.ascontiguousarray(array).view(np.complex128)
                array = numbers[..., 0]
            arrays[name] = array
    return arrays


def save_tensors(
    tensors: Mapping[str, Tensor],
    path: Path,
) -> None:
    """Write a file for `load_tensors`. The tensors may share memory and have any strides."""
    path.write_bytes(tensor_bytes(tensors))


def tensor_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of the file that `save_tensors` writes."""
    import torch
    from safetensors.torch import save

    pairs: list[str] = []
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        copied = plain.clone(memory_format=torch.contiguous_format)
        if copied.dtype == torch.complex128:
            pairs.append(name)
            copied = torch.view_as_real(copied)
        stored[name] = copied
    metadata = {COMPLEX128: json.dumps(pairs)} if pairs else None
    return bytes(save(stored, metadata))


def read_samples(path: Path) -> list[dict[str, Tensor]]:
    """The input sets of a .safetensors or .npz file.

    Keys are input names (one set), or `<index>/<name>` with indices from 0 (several sets).

    Raises:
        SpecError: the file cannot be read, has another format, or its keys do not form sets; code
            CP-SAMPLES.
    """
    import torch

    try:
        if path.suffix == ".safetensors":
            flat = load_tensors(path)
        elif path.suffix == ".npz":
            # The file is opened here, because np.load would leak its own for a damaged file.
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                flat = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        else:
            raise ValueError(f"suffix {path.suffix!r} is unknown")
    except Exception as error:  # numpy, zipfile and safetensors share no base class
        raise unreadable(path, error) from error
    return as_sets(path, flat)


def read_inputs(path: Path, spec: InputSpec) -> list[dict[str, Tensor]]:
    """The input sets of a file for a model. A file that does not fit is not read into memory.

    Raises:
        SpecError: as for `read_samples`.
        ContractError: names, dtypes or shapes differ from the spec.
    """
    check_fit(read_header(path), spec, path)
    return read_samples(path)


def check_fit(sets: Sequence[Headers], spec: InputSpec, origin: object) -> None:
    """Check the headers of input sets against a spec.

    Raises:
        ContractError: names, dtypes or shapes differ; it names the origin.
    """
    try:
        match_headers(sets, spec)
    except SpecError as error:
        raise ContractError(f"{origin}: {error}") from None


def golden_sets(
    path: Path,
    names: Sequence[str],
    num_sets: int,
    load: _Load[_Value],
) -> list[dict[str, _Value]]:
    """Read a golden file, whose digest was verified: every set by input or output name.

    Raises:
        IntegrityError: it cannot be read, or lacks a tensor.
    """
    sets: list[dict[str, _Value]] = []
    try:
        stored = load(path)
        for index in range(num_sets):
            sets.append({name: stored[f"{index}/{name}"] for name in names})
    except Exception as error:  # numpy and safetensors share no base class
        raise IntegrityError(
            f"{path} is not the golden file of its manifest ({type(error).__name__}:"
            f" {first_line(error)}); pull the artifact again"
        ) from None
    return sets
