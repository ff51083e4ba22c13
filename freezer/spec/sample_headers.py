"""Headers of sample files: names, dtypes and shapes of tensors, checked against a spec. Imports no torch.

A file contains one set of inputs under their names, or several under `<index>/<name>`, with indices from 0.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar
from zipfile import BadZipFile, ZipFile

from freezer.errors import MissingDependencyError, SpecError
from freezer.spec.inputs import InputSpec
from freezer.spec.items import TensorSpec

if TYPE_CHECKING:
    import numpy as np

CODE = "CP-SAMPLES"
"""Code of all errors about samples."""

COMPLEX128 = "complex128"
"""Metadata key of .safetensors files: tensors stored as pairs of float64; see runtime/tensors.py."""

Header = tuple[str, tuple[int, ...]]
"""Dtype, by torch's name, and shape of a tensor."""

READ_ERRORS = (OSError, ValueError, RuntimeError, TypeError, EOFError, KeyError, BadZipFile, zlib.error)
"""Errors of reading damaged files and files of another kind."""

_SAFETENSORS: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "C64": "complex64",
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}

_Value = TypeVar("_Value")


def read_header(path: Path) -> list[dict[str, Header]]:
    """Read dtypes and shapes from a .safetensors or .npz file: input sets by name, without the tensors.

    Raises:
        SpecError: the file cannot be read, or its keys do not form sets; code CP-SAMPLES.
        MissingDependencyError: numpy is not installed.
    """
    try:
        import numpy as np  # noqa: F401  # reads both kinds of files
    except ImportError:
        raise MissingDependencyError("reading samples needs numpy; pip install numpy") from None
    try:
        flat = dict(_headers(path))
    except READ_ERRORS as error:
        raise unreadable(path, error) from error
    return as_sets(path, flat)


def match_headers(sets: Sequence[Mapping[str, Header]], spec: InputSpec) -> list[dict[str, int]]:
    """Check sample sets against a spec, and return the point of each.

    Raises:
        SpecError: names, dtypes, ranks or sizes differ; code CP-SAMPLES.
    """
    return [_point(headers, spec, index) for index, headers in enumerate(sets)]


def as_sets(path: Path, flat: Mapping[str, _Value]) -> list[dict[str, _Value]]:
    """Group the content of a file into sets by input name.

    Raises:
        SpecError: the keys do not form sets; code CP-SAMPLES.
    """
    indexed = [key for key in flat if key.partition("/")[0].isdecimal() and "/" in key]
    if not indexed:
        return [dict(flat)]
    if len(indexed) != len(flat):
        raise SpecError(f"samples {path}: keys {sorted(flat)[:5]} mix `<index>/<name>` with plain names; use one form", code=CODE)
    sets: dict[int, dict[str, _Value]] = {}
    for key, value in flat.items():
        index, _, name = key.partition("/")
        if name in sets.setdefault(int(index), {}):
            raise SpecError(f"samples {path}: input {name!r} is given twice in set {int(index)}", code=CODE)
        sets[int(index)][name] = value
    if sorted(sets) != list(range(len(sets))):
        raise SpecError(f"samples {path}: set indices are {sorted(sets)}; expected 0 to {len(sets) - 1}", code=CODE)
    return [sets[index] for index in range(len(sets))]


def unreadable(path: Path, error: Exception) -> SpecError:
    """The error for a file that cannot be read."""
    what = str(error) or type(error).__name__
    return SpecError(f"samples {path}: {what}; expected a readable .safetensors or .npz file", code=CODE)


def _headers(path: Path) -> Iterator[tuple[str, Header]]:
    if path.suffix == ".safetensors":
        yield from _safetensors_headers(path)
    elif path.suffix == ".npz":
        yield from _npz_headers(path)
    else:
        raise ValueError(f"suffix {path.suffix!r} is unknown")


def _safetensors_headers(path: Path) -> Iterator[tuple[str, Header]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            pairs = json.loads((file.metadata() or {}).get(COMPLEX128, "[]"))
            for name in file.keys():  # noqa: SIM118  # not a mapping
                entry = file.get_slice(name)
                kind, shape = entry.get_dtype(), tuple(entry.get_shape())
                yield name, (COMPLEX128, shape[:-1]) if name in pairs else (_SAFETENSORS.get(kind, kind), shape)
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def _npz_headers(path: Path) -> Iterator[tuple[str, Header]]:
    with ZipFile(path) as archive:
        for info in archive.infolist():
            if not info.filename.endswith(".npy"):
                raise ValueError(f"{info.filename!r} is not an array")
            name = info.filename.removesuffix(".npy")
            with archive.open(info) as file:
                dtype, shape = _npy_header(file)  # type: ignore[arg-type]  # members of a zip are binary files
                _check_dtype(name, dtype)
                if file.tell() + math.prod(shape) * dtype.itemsize != info.file_size:
                    raise ValueError(f"{name!r} does not match its shape {list(shape)}")
            yield name, (dtype.name, shape)


def _npy_header(file: BinaryIO) -> tuple[np.dtype, tuple[int, ...]]:
    """Dtype and shape of a .npy file. Format 3 is for structured arrays only."""
    from numpy.lib import format as npy

    version = npy.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = npy.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, _, dtype = npy.read_array_header_2_0(file)
    else:
        raise ValueError(f"format {version} is unknown")
    return dtype, shape


def _check_dtype(name: str, dtype: np.dtype) -> None:
    if dtype.hasobject:
        raise ValueError(f"{name!r} contains pickled objects, which are never loaded")
    if dtype.kind not in "biufc" or not dtype.isnative:
        raise ValueError(f"{name!r} is an array of {dtype.str}, expected numbers or bools in this machine's byte order")


def _point(headers: Mapping[str, Header], spec: InputSpec, index: int) -> dict[str, int]:
    """Check one sample set, and return its point."""
    wanted = {item.name for item in spec.tensors}
    if wanted != set(headers):
        raise SpecError(f"sample set {index}: got tensors {sorted(headers)}, expected the inputs {sorted(wanted)}", code=CODE)
    point: dict[str, int] = {}
    for item in spec.tensors:
        _match(item, headers[item.name], spec, point, f"sample set {index}, input {item.name!r}")
    return point


def _match(item: TensorSpec, header: Header, spec: InputSpec, point: dict[str, int], place: str) -> None:
    """Check one tensor, and add the sizes of its named dims to the point."""
    dtype, shape = header
    if dtype != item.dtype:
        raise SpecError(f"{place}: got dtype {dtype}, expected {item.dtype}", code=CODE)
    fixed = all(isinstance(want, str) or size == want for size, want in zip(shape, item.shape, strict=False))
    if len(shape) != len(item.shape) or not fixed:
        raise SpecError(f"{place}: got shape {list(shape)}, expected {list(item.shape)}", code=CODE)
    bounds = {dim.name: dim for dim in spec.dims}
    for size, name in zip(shape, item.shape, strict=True):
        if isinstance(name, str):
            dim = bounds[name]
            if point.setdefault(name, size) != size or size not in dim.sizes:
                allowed = str(dim).partition(" from ")[2]
                raise SpecError(f"{place}: dim {name!r} is {size}, expected one size for all inputs, {allowed}", code=CODE)
