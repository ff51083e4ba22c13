"""Headers of sample files: names, dtypes and shapes of tensors, checked against a spec. Imports no
torch.

A file contains one set of inputs under their names, or several under `<index>/<name>`, with indices
from 0.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar
from zipfile import BadZipFile

from freezer.errors import MissingDependencyError, SpecError
from freezer.spec.inputs import InputSpec

BAD_SAMPLES = "CP-SAMPLES"
"""Code of all errors about samples."""

COMPLEX128 = "complex128"
"""Metadata key of .safetensors files: tensors stored as pairs of float64; see runtime/tensors.py.
"""

Header = tuple[str, tuple[int, ...]]
"""Dtype, by torch's name, and shape of a tensor."""

READ_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    TypeError,
    EOFError,
    KeyError,
    BadZipFile,
    zlib.error,
)
"""Errors of reading damaged files and files of another kind."""

_SAFETENSORS: Mapping[str, str] = {
    "F": "float",
    "BF": "bfloat",
    "C": "complex",
    "U": "uint",
    "I": "int",
    "BOOL": "bool",
}
"""Names of dtypes in .safetensors files, without their number of bits."""

_Value = TypeVar("_Value")


def read_header(path: Path) -> list[dict[str, Header]]:
    """Read dtypes and shapes from a .safetensors or .npz file: input sets by name.

    Raises:
        SpecError: the file cannot be read, or its keys do not form sets; code CP-SAMPLES.
        MissingDependencyError: numpy is not installed.
    """
    try:
        import numpy as np
    except ImportError:
        raise MissingDependencyError("reading samples needs numpy; pip install numpy") from None
    try:
        if path.suffix == ".safetensors":
            flat = _safetensors_headers(path)
        elif path.suffix == ".npz":
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                flat = {
                    name: (np.asarray(array).dtype.name, np.shape(array))
                    for name, array in arrays.items()
                }
        else:
            raise ValueError(f"suffix {path.suffix!r} is unknown")
    except READ_ERRORS as error:
        raise unreadable(path, error) from error
    return as_sets(path, flat)


def _safetensors_headers(path: Path) -> dict[str, Header]:
    from safetensors import SafetensorError, safe_open

    found: dict[str, Header] = {}
    try:
        with safe_open(path, framework="np") as file:
            pairs = json.loads((file.metadata() or {}).get(COMPLEX128, "[]"))
            for name in file.keys():  # noqa: SIM118  # not a mapping
                entry = file.get_slice(name)
                kind, shape = entry.get_dtype(), tuple(entry.get_shape())
                letters = kind.rstrip("0123456789")
                dtype = _SAFETENSORS.get(letters, letters) + kind.removeprefix(letters)
                found[name] = (COMPLEX128, shape[:-1]) if name in pairs else (dtype, shape)
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    return found


def match_headers(sets: Sequence[Mapping[str, Header]], spec: InputSpec) -> list[dict[str, int]]:
    """Check sample sets against a spec, and return the point of each.

    Raises:
        SpecError: names, dtypes, ranks or sizes differ; code CP-SAMPLES.
    """
    return [_point(headers, spec, f"sample set {index}") for index, headers in enumerate(sets)]


def _point(headers: Mapping[str, Header], spec: InputSpec, place: str) -> dict[str, int]:
    """Check one sample set, and return its point."""
    wanted = {item.name for item in spec.tensors}
    if wanted != set(headers):
        raise SpecError(
            f"{place}: got tensors {sorted(headers)}, expected the inputs {sorted(wanted)}",
            code=BAD_SAMPLES,
        )
    dims = {dim.name: dim for dim in spec.dims}
    point: dict[str, int] = {}
    for item in spec.tensors:
        dtype, shape = headers[item.name]
        at = f"{place}, input {item.name!r}"
        if dtype != item.dtype:
            raise SpecError(f"{at}: got dtype {dtype}, expected {item.dtype}", code=BAD_SAMPLES)
        fixed = all(
            isinstance(want, str) or size == want
            for size, want in zip(shape, item.shape, strict=False)
        )
        if len(shape) != len(item.shape) or not fixed:
            raise SpecError(
                f"{at}: got shape {list(shape)}, expected {list(item.shape)}", code=BAD_SAMPLES
            )
        for size, name in zip(shape, item.shape, strict=True):
            if isinstance(name, str) and (
                point.setdefault(name, size) != size or size not in dims[name].sizes
            ):
                allowed = str(dims[name]).partition(" from ")[2]
                raise SpecError(
                    f"{at}: dim {name!r} is {size}, expected one size for all inputs, {allowed}",
                    code=BAD_SAMPLES,
                )
    return point


def as_sets(path: Path, flat: Mapping[str, _Value]) -> list[dict[str, _Value]]:
    """Group the content of a file into sets by input name.

    Raises:
        SpecError: the keys do not form sets; code CP-SAMPLES.
    """
    indexed = [key for key in flat if key.partition("/")[0].isdecimal() and "/" in key]
    if not indexed:
        return [dict(flat)]
    if len(indexed) != len(flat):
        raise SpecError(
            f"samples {path}: keys {sorted(flat)[:5]} mix `<index>/<name>` with plain names; use"
            " one form",
            code=BAD_SAMPLES,
        )
    sets: dict[int, dict[str, _Value]] = {}
    for key, value in flat.items():
        index, _, name = key.partition("/")
        sets.setdefault(int(index), {})[name] = value
    if sorted(sets) != list(range(len(sets))):
        raise SpecError(
            f"samples {path}: set indices are {sorted(sets)}; expected 0 to {len(sets) - 1}",
            code=BAD_SAMPLES,
        )
    return [sets[index] for index in range(len(sets))]


def unreadable(path: Path, error: Exception) -> SpecError:
    """The error for a file that cannot be read."""
    what = str(error) or type(error).__name__
    return SpecError(
        f"samples {path}: {what}; expected a readable .safetensors or .npz file", code=BAD_SAMPLES
    )
