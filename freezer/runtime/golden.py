"""Golden files of an artifact, checked against its manifest.

Imports no torch, unless they are read as tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from freezer.artifact import Manifest
from freezer.errors import IntegrityError, first_line
from freezer.spec import READ_ERRORS

if TYPE_CHECKING:
    from torch import Tensor

Sets = list[dict[str, "Tensor"]]
"""Tensors by name, of every golden set."""

Load = Callable[[Path], Mapping[str, Any]]
"""Reads the tensors of a file: `load_tensors`, the default, or `load_arrays`."""


def golden_inputs(manifest: Manifest, path: Path, load: Load | None = None) -> Sets:
    """Read golden inputs, whose digest was verified.

    Raises:
        IntegrityError: they are not what the manifest says: one tensor for each input and set, of
            its dtype and shape.
    """
    dims = {dim.name: dim for dim in manifest.inputs.dims}
    for index, item in enumerate(manifest.golden):
        if set(item.point) != set(dims) or any(
            size not in dims[name].sizes for name, size in item.point.items()
        ):
            raise IntegrityError(
                f"{path}: golden set {index} has sizes {dict(item.point)}, expected sizes of"
                f" {sorted(dims)}"
            )
    specs = manifest.inputs.tensors
    sets = _read(manifest, path, [spec.name for spec in specs], load)
    for item, tensors in zip(manifest.golden, sets, strict=True):
        for spec in specs:
            _check(path, spec.name, tensors[spec.name], spec.dtype, spec.at(item.point))
    return sets


def golden_outputs(manifest: Manifest, path: Path, load: Load | None = None) -> Sets:
    """Read golden outputs, whose digest was verified.

    Raises:
        IntegrityError: they are not what the manifest says: one tensor for each output and set, of
            its dtype and rank.
    """
    sets = _read(manifest, path, [spec.name for spec in manifest.outputs], load)
    for tensors in sets:
        for spec in manifest.outputs:
            shape = tuple(tensors[spec.name].shape)
            if len(shape) != spec.rank:
                raise _other(path, spec.name, f"has shape {list(shape)}, expected rank {spec.rank}")
            _check(path, spec.name, tensors[spec.name], spec.dtype, shape)
    return sets


def own_outputs(path: Path, golden: Sets) -> Sets:
    """Read the outputs that an artifact recorded of itself, whose digest was verified; large ones
    are missing.

    Raises:
        IntegrityError: one has another dtype or shape than the golden output.
    """
    found = _tensors(path)
    sets = []
    for index, outputs in enumerate(golden):
        own = {name: found[f"{index}/{name}"] for name in outputs if f"{index}/{name}" in found}
        for name, tensor in own.items():
            _check(path, name, tensor, _dtype(outputs[name]), tuple(outputs[name].shape))
        sets.append(own)
    return sets


def _read(manifest: Manifest, path: Path, names: list[str], load: Load | None) -> Sets:
    found = _tensors(path, load)
    wanted = [[f"{index}/{name}" for name in names] for index in range(len(manifest.golden))]
    if missing := [key for keys in wanted for key in keys if key not in found]:
        raise _other(path, missing[0], "is missing")
    return [{name: found[key] for name, key in zip(names, keys, strict=True)} for keys in wanted]


def _tensors(path: Path, load: Load | None = None) -> Mapping[str, Any]:
    if load is None:
        from freezer.runtime.tensors import load_tensors

        load = load_tensors
    try:
        return load(path)
    except (SafetensorError, AttributeError, *READ_ERRORS) as error:
        raise IntegrityError(
            f"{path} is not a .safetensors file of an artifact: {first_line(error)}; pull it again"
        ) from None


def _check(path: Path, name: str, tensor: Any, dtype: str, shape: tuple[int, ...]) -> None:
    if _dtype(tensor) != dtype or tuple(tensor.shape) != shape:
        raise _other(
            path, name, f"is {_dtype(tensor)} {list(tensor.shape)}, expected {dtype} {list(shape)}"
        )


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _other(path: Path, name: str, problem: str) -> IntegrityError:
    return IntegrityError(
        f"{path}: tensor {name!r} {problem}; the artifact was changed or damaged: pull it again"
    )
