"""Headers of sample files: names, dtypes and shapes of tensors, checked against a spec. Imports no
torch.

A file contains one set of inputs under their names, or several under `<index>/<name>`, with indices
from 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar
from zipfile import ZipFile

from freezer.errors import SpecError, first_line
from freezer.spec.inputs import InputSpec
from freezer.spec.items import Sizes

BAD_SAMPLES = "CP-SAMPLES"
"""Code of all errors about samples."""

COMPLEX128 = "complex128"
"""Metadata key of .safetensors files: tensors stored as pairs of float64; see runtime/tensors.py.
"""

Header = tuple[str, tuple[int, ...]]
"""Dtype, by torch's name, and shape of a tensor."""

Headers = Mapping[str, Header]

SAFETENSORS: Mapping[str, str] = {
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F32": "float32",
    "I32": "int32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Dtypes in .safetensors files, in the order in which such a file has them."""

_Value = TypeVar("_Value")


def read_header(path: Path) -> list[dict[str, Header]]:
    """Read dtypes and shapes from a .safetensors or .npz file: input sets by name.

    Raises:
        SpecError: the file cannot be read, or its keys do not form sets; code CP-SAMPLES.
    """
    readers = {".safetensors": _safetensors_headers, ".npz": _npz_headers}
    try:
        if not path.is_file():  # a pipe would never end
            raise ValueError("it is not a file")
        flat = readers[path.suffix](path)
    except Exception as error:  # numpy, zipfile and safetensors share no base class
        raise unreadable(path, error) from error
    return as_sets(path, flat)


def _npz_headers(path: Path) -> dict[str, Header]:
    """Read the headers alone: a compressed array may be larger than the memory."""
    from numpy.lib import format as npy

    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    headers = {}
    with ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as file:
                shape, _, dtype = readers[npy.read_magic(file)](file)
            if dtype.hasobject:
                raise ValueError(f"{name} has Python objects")
            headers[name.removesuffix(".npy")] = (dtype.name, shape)
    return headers


def _safetensors_headers(path: Path) -> dict[str, Header]:
    from safetensors import safe_open

    headers = {}
    with safe_open(path, framework="np") as file:
        pairs = pairs_in(file.metadata())
        for name in file.keys():  # noqa: SIM118  # not a mapping
            entry = file.get_slice(name)
            headers[name] = header_of(entry.get_dtype(), entry.get_shape(), paired=name in pairs)
    return headers


def pairs_in(metadata: Mapping[str, str] | None) -> Sequence[str]:
    """The names of the tensors that a .safetensors file stores as pairs of real numbers."""
    pairs: list[str] = json.loads((metadata or {}).get(COMPLEX128, "[]"))
    return pairs


def header_of(kind: str, sizes: Sequence[int], *, paired: bool) -> Header:
    """The dtype and shape of a tensor in a .safetensors file.

    Args:
        kind: its dtype in the file.
        sizes: its shape in the file.
        paired: whether the file lists it as complex128.
    """
    shape = tuple(sizes)
    if paired and kind == "F64" and shape[-1:] == (2,):
        return COMPLEX128, shape[:-1]
    return SAFETENSORS.get(kind, kind), shape


def match_headers(sets: Sequence[Headers], spec: InputSpec) -> list[Sizes]:
    """Check sample sets against a spec, and return the point of each.

    Raises:
        SpecError: names, dtypes, ranks or sizes differ; code CP-SAMPLES.
    """
    points = []
    for index, headers in enumerate(sets):
        try:
            points.append(_point(headers, spec))
        except SpecError as error:
            raise SpecError(f"sample set {index}: {error}", code=BAD_SAMPLES) from None
    return points


def of_inputs(values: Mapping[str, _Value], spec: InputSpec) -> dict[str, _Value]:
    """The values of a sample set that are inputs; held-out samples may also have labels."""
    names = {tensor.name for tensor in spec.tensors}
    return {name: value for name, value in values.items() if name in names}


def _point(headers: Headers, spec: InputSpec) -> Sizes:
    """Check one sample set, and return its point."""
    names = sorted(tensor.name for tensor in spec.tensors)
    if names != sorted(headers):
        raise SpecError(f"got tensors {sorted(headers)}, expected the inputs {names}")
    point: Sizes = {}
    for tensor in spec.tensors:
        dtype, shape = headers[tensor.name]
        for name, size in zip(tensor.shape, shape, strict=False):
            if isinstance(name, str):
                point.setdefault(name, size)
        same_rank = len(shape) == len(tensor.shape)
        if dtype != tensor.dtype or not same_rank or shape != tensor.at(point):
            raise SpecError(
                f"input {tensor.name!r}: got {dtype} {shape}, expected {tensor.dtype}"
                f" {tensor.shape} with one size of each dim: {point}"
            )
    for dim in spec.dims:
        if point[dim.name] not in dim.sizes:
            raise SpecError(f"dim {dim.name!r} is {point[dim.name]}, expected {dim}")
    return point


def as_sets(path: Path, flat: Mapping[str, _Value]) -> list[dict[str, _Value]]:
    """Group the content of a file into sets by input name.

    Raises:
        SpecError: the keys do not form sets; code CP-SAMPLES.
    """
    plain = {}
    sets: dict[str, dict[str, _Value]] = {}
    for key, value in flat.items():
        index, slash, name = key.partition("/")
        if slash and index.isdecimal():
            sets.setdefault(index, {})[name] = value
        else:
            plain[key] = value
    if not sets:
        return [plain]
    indices = [str(index) for index in range(len(sets))]
    if plain or set(sets) != set(indices):
        raise SpecError(
            f"samples {path}: got the keys {sorted(flat)[:5]}, expected names alone, or all of the"
            " form `<index>/<name>` with indices from 0",
            code=BAD_SAMPLES,
        )
    return [sets[index] for index in indices]


def unreadable(path: Path, error: Exception) -> SpecError:
    """The error for a file that cannot be read."""
    return SpecError(
        f"samples {path}: {first_line(error)}; expected a readable .safetensors or .npz file",
        code=BAD_SAMPLES,
    )
