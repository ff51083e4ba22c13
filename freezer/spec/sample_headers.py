"""Files of samples, by their headers: names, dtypes and shapes of the tensors, held against a spec. Imports no torch.

A file holds one set of inputs under their names, or several under `<index>/<name>` with indices from 0.
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
"""Of every error about samples."""

COMPLEX128 = "complex128"
"""The key of a .safetensors file's metadata that lists the tensors stored as pairs of float64; see runtime/tensor_files.py."""

Header = tuple[str, tuple[int, ...]]
"""A tensor's dtype, as torch names it, and its shape."""

READ_ERRORS = (OSError, ValueError, RuntimeError, TypeError, EOFError, KeyError, BadZipFile, zlib.error)
"""What reading a file raises that is damaged, or of another kind."""

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
    """The dtypes and shapes of the sets of a .safetensors or .npz file, by input name; no tensor is read.

    Raises:
        SpecError: the file cannot be read, is of another kind, or its keys do not form sets; code CP-SAMPLES.
        MissingDependencyError: numpy is not installed.
    """
    try:
        import numpy as np  # noqa: F401  # both kinds of file are read through it
    except ImportError:
        raise MissingDependencyError("reading samples needs numpy; pip install numpy") from None
    try:
        flat = dict(_headers(path))
    except READ_ERRORS as error:
        raise unreadable(path, error) from error
    return as_sets(path, flat)


def match_headers(sets: Sequence[Mapping[str, Header]], spec: InputSpec) -> list[dict[str, int]]:
    """The point of every sample set, after holding it against a spec.

    Args:
        sets: dtype and shape of each tensor, by input name.
        spec: whose tensor inputs they are.

    Raises:
        SpecError: names, dtypes, ranks or sizes differ from the spec; code CP-SAMPLES.
    """
    return [_point(headers, spec, index) for index, headers in enumerate(sets)]


def as_sets(path: Path, flat: Mapping[str, _Value]) -> list[dict[str, _Value]]:
    """What a file holds by key, as sets by input name.

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
            raise SpecError(f"samples {path}: input {name!r} is twice in set {int(index)}", code=CODE)
        sets[int(index)][name] = value
    if sorted(sets) != list(range(len(sets))):
        raise SpecError(f"samples {path}: set indices are {sorted(sets)}; expected 0 to {len(sets) - 1}", code=CODE)
    return [sets[index] for index in range(len(sets))]


def unreadable(path: Path, error: Exception) -> SpecError:
    """The error for a file that reading fails on."""
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
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                entry = file.get_slice(name)
                kind, shape = entry.get_dtype(), tuple(entry.get_shape())
                yield name, (COMPLEX128, shape[:-1]) if name in pairs else (_SAFETENSORS.get(kind, kind), shape)
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def _npz_headers(path: Path) -> Iterator[tuple[str, Header]]:
    with ZipFile(path) as archive:
        for info in archive.infolist():
            if not info.filename.endswith(".npy"):
                raise ValueError(f"{info.filename!r} is no array")
            name = info.filename.removesuffix(".npy")
            with archive.open(info) as file:
                dtype, shape = _npy_header(file)  # type: ignore[arg-type]  # a zip's member reads as a binary file does
                _check_dtype(name, dtype)
                if file.tell() + math.prod(shape) * dtype.itemsize != info.file_size:
                    raise ValueError(f"{name!r} holds fewer or more numbers than its shape {list(shape)}")
            yield name, (dtype.name, shape)


def _npy_header(file: BinaryIO) -> tuple[np.dtype, tuple[int, ...]]:
    """Dtype and shape of a .npy file. Format 3 is for structured arrays alone, which are no tensors."""
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
        raise ValueError(f"{name!r} holds pickled objects, which are never opened (allow_pickle=False)")
    if dtype.kind not in "biufc" or not dtype.isnative:
        raise ValueError(f"{name!r} is an array of {dtype.str}, expected numbers or bools in this machine's byte order")


def _point(headers: Mapping[str, Header], spec: InputSpec, index: int) -> dict[str, int]:
    """The point of one sample set."""
    wanted = {item.name for item in spec.tensors}
    if wanted != set(headers):
        raise SpecError(f"sample set {index}: got tensors {sorted(headers)}, expected the inputs {sorted(wanted)}", code=CODE)
    point: dict[str, int] = {}
    for item in spec.tensors:
        _match(item, headers[item.name], spec, point, f"sample set {index}, input {item.name!r}")
    return point


def _match(item: TensorSpec, header: Header, spec: InputSpec, point: dict[str, int], place: str) -> None:
    """Hold one tensor against its spec; the sizes of its named dims go into the point."""
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
