r"""Tensors and arrays in .safetensors and .npz files, and the golden files of an artifact.

Imports no torch, unless tensors are read or written. safetensors has no complex128: such a tensor
is stored as float64 with a last dim of 2 (real, imaginary), and listed in the file's metadata:
`{"complex128": "[\"0/x\"]"}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from safetensors import deserialize, safe_open

from freezer.errors import ContractError, IntegrityError, SpecError, first_line
from freezer.runtime.arrays import Array, dtype_of, name_of
from freezer.spec import (
    COMPLEX128,
    DTYPES,
    SAFETENSORS,
    Headers,
    InputSpec,
    as_sets,
    header_of,
    match_headers,
    pairs_in,
    read_header,
    unreadable,
)

if TYPE_CHECKING:
    from torch import Tensor


_LENGTH_BYTES = 8
"""Size of the header's length, with which a .safetensors file begins."""

_KINDS, _NAMES = tuple(SAFETENSORS), tuple(SAFETENSORS.values())

_Content = TypeVar("_Content")


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
        SafetensorError, OSError, ValueError: it cannot be read, or has another dtype than
            contracts have.
    """
    return arrays_in(path.read_bytes())


def arrays_in(data: bytes) -> dict[str, Array]:
    """The arrays in the bytes of a .safetensors file by name, bfloat16 as BFLOAT16.

    Raises:
        SafetensorError, ValueError: it is not such a file, or has another dtype than contracts
            have.
    """
    stored = dict(deserialize(data))  # type: ignore[no-untyped-call]
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
    pairs = pairs_in(header.get("__metadata__"))
    arrays: dict[str, Array] = {}
    for name, entry in stored.items():
        dtype, shape = header_of(entry["dtype"], entry["shape"], paired=name in pairs)
        if dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {dtype}, expected one of {', '.join(DTYPES)}")
        arrays[name] = np.ndarray(shape, dtype_of(dtype), buffer=entry["data"])
    return arrays


def array_bytes(arrays: Mapping[str, Array]) -> bytes:
    """The bytes of a .safetensors file with arrays of DTYPES; the library writes no bfloat16
    without torch.
    """
    stored = dict(arrays)
    header: dict[str, Any] = {}
    pairs = [name for name, array in arrays.items() if array.dtype == np.complex128]
    for name in pairs:
        stored[name] = np.asarray(arrays[name], order="C")[..., None].view(np.float64)
        header["__metadata__"] = {COMPLEX128: json.dumps(pairs)}
    ranks = {name: _NAMES.index(name_of(array.dtype)) for name, array in stored.items()}
    data = bytearray()
    for name in sorted(stored, key=lambda name: (ranks[name], name)):
        begin = len(data)
        data += stored[name].tobytes()
        header[name] = {
            "dtype": _KINDS[ranks[name]],
            "shape": stored[name].shape,
            "data_offsets": [begin, len(data)],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + data


def save_tensors(
    tensors: Mapping[str, Tensor],
    path: Path,
) -> None:
    """Write a file for `load_tensors`. The tensors may share memory and have any strides."""
    path.write_bytes(tensor_bytes(tensors))


def tensor_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of the file that `save_tensors` writes."""
    from freezer.runtime.tensors import to_array

    return array_bytes({name: to_array(tensor) for name, tensor in tensors.items()})


def read_samples(path: Path) -> list[dict[str, Tensor]]:
    """The input sets of a .safetensors or .npz file.

    Keys are input names (one set), or `<index>/<name>` with indices from 0 (several sets).

    Raises:
        SpecError: the file cannot be read, has another format, or its keys do not form sets; code
            CP-SAMPLES.
    """
    import torch

    return as_sets(path, _content(path, load_tensors, torch.from_numpy))


def _content(
    path: Path,
    load: Callable[[Path], dict[str, _Content]],
    convert: Callable[[Array], _Content],
) -> dict[str, _Content]:
    """The content of a file of samples by key.

    Args:
        path: the file.
        load: reads a .safetensors file.
        convert: converts an array of an .npz file.
    """
    try:
        if path.suffix == ".safetensors":
            return load(path)
        if path.suffix == ".npz":
            # The file is opened here, because np.load would leak its own for a damaged file.
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return {name: convert(arrays[name]) for name in arrays.files}
        raise ValueError(f"suffix {path.suffix!r} is unknown")
    except Exception as error:  # numpy, zipfile and safetensors share no base class
        raise unreadable(path, error) from error


def read_inputs(path: Path, spec: InputSpec) -> list[dict[str, Array]]:
    """The input sets of a file for a model. A file that does not fit is not read into memory.

    Raises:
        SpecError: as for `read_samples`.
        ContractError: names, dtypes or shapes differ from the spec.
    """
    check_fit(read_header(path), spec, path)
    return as_sets(path, _content(path, load_arrays, np.asarray))


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
) -> list[dict[str, Array]]:
    """Read a golden file, whose digest was verified: every set by input or output name.

    Raises:
        IntegrityError: it cannot be read, or lacks a tensor.
    """
    sets: list[dict[str, Array]] = []
    try:
        stored = load_arrays(path)
        for index in range(num_sets):
            sets.append({name: stored[f"{index}/{name}"] for name in names})
    except Exception as error:  # numpy and safetensors share no base class
        raise IntegrityError(
            f"{path} is not the golden file of its manifest ({type(error).__name__}:"
            f" {first_line(error)}); pull the artifact again"
        ) from None
    return sets
