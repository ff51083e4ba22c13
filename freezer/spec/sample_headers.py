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

from freezer.errors import MissingDependencyError, SpecError
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

_SAFETENSORS: Mapping[str, str] = {
    "F": "float",
    "BF": "bfloat",
    "C": "complex",
    "U": "uint",
    "I": "int",
    "BOOL": "bool",
}
"""Names of dtypes in .safetensors files, without their number of bits."""

_MAX_DIGITS = 10
"""Of an index of a set."""

_Value = TypeVar("_Value")


def read_header(path: Path) -> list[dict[str, Header]]:
    """Read dtypes and shapes from a .safetensors or .npz file: input sets by name.

    Raises:
        SpecError: the file cannot be read, or its keys do not form sets; code CP-SAMPLES.
        MissingDependencyError: numpy is not installed.
    """
    try:
        if not path.is_file():  # a pipe would never end
            raise ValueError("it is not a file")
        if path.suffix == ".safetensors":
            flat = _safetensors_headers(path)
        elif path.suffix == ".npz":
            flat = _npz_headers(path)
        else:
            raise ValueError(f"suffix {path.suffix!r} is unknown")
    except MissingDependencyError:
        raise
    except Exception as error:  # numpy, zipfile and safetensors share no base class
        raise unreadable(path, error) from error
    return as_sets(path, flat)


def _npz_headers(path: Path) -> dict[str, Header]:
    """Read the headers alone: a compressed array may be larger than the memory."""
    try:
        from numpy.lib import format as npy
    except ImportError:
        raise MissingDependencyError("reading samples needs numpy; pip install numpy") from None
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    headers: dict[str, Header] = {}
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

    headers: dict[str, Header] = {}
    with safe_open(path, framework="np") as file:
        metadata = file.metadata() or {}
        pairs = json.loads(metadata.get(COMPLEX128, "[]"))
        for name in file.keys():  # noqa: SIM118  # not a mapping
            entry = file.get_slice(name)
            kind, shape = entry.get_dtype(), tuple(entry.get_shape())
            letters = kind.rstrip("0123456789")
            bits = kind.removeprefix(letters)
            dtype = _SAFETENSORS.get(letters, letters) + bits
            headers[name] = (COMPLEX128, shape[:-1]) if name in pairs else (dtype, shape)
    return headers


def match_headers(
    sets: Sequence[Headers],
    spec: InputSpec,
) -> list[Sizes]:
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


def _point(
    headers: Headers,
    spec: InputSpec,
) -> Sizes:
    """Check one sample set, and return its point."""
    names = sorted(tensor.name for tensor in spec.tensors)
    if names != sorted(headers):
        raise SpecError(f"got tensors {sorted(headers)}, expected the inputs {names}")
    dims = {dim.name: dim for dim in spec.dims}
    point: Sizes = {}
    for tensor in spec.tensors:
        place = f"input {tensor.name!r}"
        dtype, shape = headers[tensor.name]
        if dtype != tensor.dtype:
            raise SpecError(f"{place}: got dtype {dtype}, expected {tensor.dtype}")
        fits = len(shape) == len(tensor.shape)
        for size, name in zip(shape, tensor.shape, strict=False):
            if isinstance(name, int):
                fits = fits and size == name
        if not fits:
            raise SpecError(f"{place}: got shape {shape}, expected {tensor.shape}")
        for size, name in zip(shape, tensor.shape, strict=True):
            if isinstance(name, int):
                continue
            known = point.setdefault(name, size)
            if size != known or size not in dims[name].sizes:
                raise SpecError(
                    f"{place}: dim {name!r} is {size}, expected one size for all inputs,"
                    f" {dims[name]}"
                )
    return point


def as_sets(
    path: Path,
    flat: Mapping[str, _Value],
) -> list[dict[str, _Value]]:
    """Group the content of a file into sets by input name.

    Raises:
        SpecError: the keys do not form sets; code CP-SAMPLES.
    """
    plain: dict[str, _Value] = {}
    sets: dict[int, dict[str, _Value]] = {}
    for key, value in flat.items():
        index, slash, name = key.partition("/")
        if slash and index.isdecimal() and len(index) < _MAX_DIGITS:
            sets.setdefault(int(index), {})[name] = value
        else:
            plain[key] = value
    if not sets:
        return [plain]
    indices = sorted(sets)
    if plain or indices != list(range(len(sets))):
        raise SpecError(
            f"samples {path}: set indices are {indices}, other keys {sorted(plain)[:5]}; expected"
            f" names alone, or indices from 0 to {len(sets) - 1} and no other keys",
            code=BAD_SAMPLES,
        )
    return [sets[index] for index in indices]


def unreadable(path: Path, error: Exception) -> SpecError:
    """The error for a file that cannot be read."""
    what = str(error) or type(error).__name__
    return SpecError(
        f"samples {path}: {what}; expected a readable .safetensors or .npz file", code=BAD_SAMPLES
    )
