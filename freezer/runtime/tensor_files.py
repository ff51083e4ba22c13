r"""Tensors and arrays in .safetensors, .npz and .npy files, and the golden files of an artifact.

Imports no torch, unless tensors are read or written. safetensors has no complex128: such a tensor
is stored as float64 with a last dim of 2 (real, imaginary), and listed in the file's metadata:
`{"complex128": "[\"0/x\"]"}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from freezer.artifact import OWN_OUTPUTS, Manifest
from freezer.errors import IntegrityError, first_line
from freezer.runtime.native import Array
from freezer.spec import COMPLEX128, READ_ERRORS, as_sets, unreadable

if TYPE_CHECKING:
    from torch import Tensor

OWN_OUTPUT_BYTES = 8 * 1024 * 1024
"""Bound of the file of an artifact's own outputs, of which the smallest are stored."""


class _Shaped(Protocol):
    """A tensor or an array."""

    @property
    def dtype(self) -> object: ...
    @property
    def shape(self) -> Sequence[int]: ...


_Value = TypeVar("_Value", bound=_Shaped)
_Load = Callable[[Path], dict[str, _Value]]
"""Reads a .safetensors file: `load_tensors` or `load_arrays`."""


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, by name.

    Raises:
        SafetensorError, OSError, ValueError: it cannot be read.
    """
    import torch

    tensors, pairs = _load(path, "pt")
    for name in pairs:
        # Copy: the file aligns to 8 bytes; torch reads complex128 by 16 bytes, and would crash.
        tensors[name] = torch.view_as_complex(tensors[name].clone())
    return tensors


def load_arrays(path: Path) -> dict[str, Array]:
    """The arrays of a .safetensors file, by name.

    Raises:
        SafetensorError, OSError, ValueError, TypeError: it cannot be read, or has a dtype that
            numpy lacks.
    """
    arrays, pairs = _load(path, "np")
    for name in pairs:
        arrays[name] = np.ascontiguousarray(arrays[name]).view(np.complex128)[..., 0]
    return arrays


def _load(path: Path, framework: str) -> tuple[dict[str, Any], list[str]]:
    """The tensors of a file by name, and the names of those that are stored as pairs."""
    with safe_open(path, framework=framework) as file:
        pairs = json.loads((file.metadata() or {}).get(COMPLEX128, "[]"))
        names = file.keys()
        return {name: file.get_tensor(name) for name in names}, pairs


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a file for `load_tensors`. The tensors may share memory and have any strides."""
    import torch
    from safetensors.torch import save_file

    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        stored[name] = plain.clone(memory_format=torch.contiguous_format)
    pairs = [name for name, tensor in stored.items() if tensor.dtype == torch.complex128]
    stored |= {name: torch.view_as_real(stored[name]) for name in pairs}
    save_file(stored, path, metadata=_metadata(pairs))


def save_arrays(arrays: Mapping[str, Array], path: Path) -> None:
    """Write a .safetensors file for `load_arrays` and `load_tensors`."""
    from safetensors.numpy import save_file

    stored = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    pairs = [name for name, array in stored.items() if array.dtype == np.complex128]
    for name in pairs:
        stored[name] = stored[name].view(np.float64).reshape(*stored[name].shape, 2)
    save_file(stored, path, metadata=_metadata(pairs))


def _metadata(pairs: Sequence[str]) -> dict[str, str] | None:
    return {COMPLEX128: json.dumps(pairs)} if pairs else None


def read_samples(path: Path) -> list[dict[str, Tensor]]:
    """The input sets of a .safetensors or .npz file.

    Keys are input names (one set), or `<index>/<name>` with indices from 0 (several sets).

    Raises:
        SpecError: the file cannot be read, has another format, or its keys do not form sets; code
            CP-SAMPLES.
    """
    import torch

    return _read_sets(path, load_tensors, torch.from_numpy)


def read_array_sets(path: Path) -> list[dict[str, Array]]:
    """The input sets of a .safetensors or .npz file as arrays; see `read_samples`."""
    return _read_sets(path, load_arrays, np.asarray)


def _read_sets(
    path: Path, load: _Load[_Value], convert: Callable[[Array], _Value]
) -> list[dict[str, _Value]]:
    try:
        if path.suffix == ".safetensors":
            flat = load(path)
        elif path.suffix == ".npz":
            # The file is opened here, because np.load would leak its own for a damaged file.
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                flat = {name: convert(arrays[name]) for name in arrays.files}
        else:
            raise ValueError(f"suffix {path.suffix!r} is unknown")
    except (SafetensorError, *READ_ERRORS) as error:
        raise unreadable(path, error) from error
    return as_sets(path, flat)


def read_npy(path: Path) -> Array:
    """The array of a .npy file.

    Raises:
        SpecError: the file cannot be read or has another format; code CP-SAMPLES.
    """
    try:
        with path.open("rb") as file:
            array: Array = np.lib.format.read_array(file, allow_pickle=False)
    except READ_ERRORS as error:
        raise unreadable(path, error) from error
    return array


def golden_inputs(manifest: Manifest, path: Path, load: _Load[_Value]) -> list[dict[str, _Value]]:
    """Read golden inputs, whose digest was verified, by input name of every golden set.

    Raises:
        IntegrityError: they are not what the manifest says: one tensor for each input and set, of
            its dtype and shape.
    """
    dims = {dim.name: dim for dim in manifest.inputs.dims}
    specs = manifest.inputs.tensors
    sets = _golden(manifest, path, [spec.name for spec in specs], load)
    for index, (golden, tensors) in enumerate(zip(manifest.golden, sets, strict=True)):
        sizes = golden.point.items()
        if set(golden.point) != set(dims) or any(n not in dims[dim].sizes for dim, n in sizes):
            raise IntegrityError(
                f"{path}: golden set {index} has sizes {dict(golden.point)}, expected sizes of"
                f" {sorted(dims)}"
            )
        for spec in specs:
            _check(path, spec.name, tensors[spec.name], spec.dtype, spec.at(golden.point))
    return sets


def golden_outputs(manifest: Manifest, path: Path, load: _Load[_Value]) -> list[dict[str, _Value]]:
    """Read golden outputs, whose digest was verified, by output name of every golden set.

    Raises:
        IntegrityError: they are not what the manifest says: one tensor for each output and set, of
            its dtype and rank.
    """
    sets = _golden(manifest, path, [spec.name for spec in manifest.outputs], load)
    for tensors in sets:
        for spec in manifest.outputs:
            shape = tuple(tensors[spec.name].shape)
            if len(shape) != spec.rank:
                problem = f"has shape {list(shape)}, expected rank {spec.rank}"
                raise _other_tensor(path, spec.name, problem)
            _check(path, spec.name, tensors[spec.name], spec.dtype, shape)
    return sets


def own_outputs(path: Path, golden: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Read the outputs that an artifact recorded of itself, whose digest was verified; large ones
    are missing.

    Raises:
        IntegrityError: one has another dtype or shape than the golden output.
    """
    flat = _verified(path, load_tensors)
    sets: list[dict[str, Tensor]] = [{} for _ in golden]
    for index, outputs in enumerate(golden):
        for name, output in outputs.items():
            tensor = flat.get(f"{index}/{name}")
            if tensor is not None:
                _check(path, name, tensor, _dtype(output), output.shape)
                sets[index][name] = tensor
    return sets


def small_outputs(names: Sequence[str], leaves: Sequence[Tensor]) -> dict[str, Tensor]:
    """Outputs of one call by name, without those that exceed OWN_OUTPUT_BYTES alone."""
    outputs = zip(names, leaves, strict=True)
    return {name: leaf for name, leaf in outputs if leaf.nbytes <= OWN_OUTPUT_BYTES}


def write_own_outputs(answers: Sequence[Mapping[str, Tensor]], folder: Path) -> None:
    """Write tensors `<set>/<output>` within OWN_OUTPUT_BYTES.

    Args:
        answers: outputs by name of each golden set, in order.
        folder: folder of the artifact.
    """
    tensors: dict[str, Tensor] = {}
    for index, outputs in enumerate(answers):
        tensors |= {f"{index}/{name}": tensor for name, tensor in outputs.items()}
    path = folder / OWN_OUTPUTS
    path.parent.mkdir(exist_ok=True)
    stored, room = dict[str, "Tensor"](), OWN_OUTPUT_BYTES
    for name, tensor in sorted(tensors.items(), key=lambda named: named[1].nbytes):
        room -= tensor.nbytes
        if room >= 0:
            stored[name] = tensor
    save_tensors(stored, path)


def _golden(
    manifest: Manifest, path: Path, names: Sequence[str], load: _Load[_Value]
) -> list[dict[str, _Value]]:
    """The tensors of every golden set by name."""
    flat, sets = _verified(path, load), []
    for index in range(len(manifest.golden)):
        missing = [name for name in names if f"{index}/{name}" not in flat]
        if missing:
            raise _other_tensor(path, f"{index}/{missing[0]}", "is missing")
        sets.append({name: flat[f"{index}/{name}"] for name in names})
    return sets


def _verified(path: Path, load: _Load[_Value]) -> dict[str, _Value]:
    try:
        return load(path)
    except (SafetensorError, AttributeError, *READ_ERRORS) as error:
        raise IntegrityError(
            f"{path} is not a .safetensors file of an artifact: {first_line(error)}; pull it again"
        ) from None


def _check(path: Path, name: str, tensor: _Shaped, dtype: str, shape: Sequence[int]) -> None:
    got = tuple(tensor.shape)
    if _dtype(tensor) != dtype or got != tuple(shape):
        problem = f"is {_dtype(tensor)} {list(got)}, expected {dtype} {list(shape)}"
        raise _other_tensor(path, name, problem)


def _dtype(tensor: _Shaped) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _other_tensor(path: Path, name: str, problem: str) -> IntegrityError:
    return IntegrityError(
        f"{path}: tensor {name!r} {problem}; the artifact was changed or damaged: pull it again"
    )
