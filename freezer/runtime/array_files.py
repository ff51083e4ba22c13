"""Numpy arrays in .safetensors, .npz and .npy files, as tensors.py has them as tensors.

Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from freezer.runtime.libtorch import Array
from freezer.spec import COMPLEX128, READ_ERRORS, as_sets, unreadable


def load_arrays(path: Path) -> dict[str, Array]:
    """The arrays of a .safetensors file, by name.

    Raises:
        SafetensorError, OSError, ValueError, TypeError: it cannot be read, or has a dtype that
            numpy lacks.
    """
    with safe_open(path, framework="np") as file:
        pairs = json.loads((file.metadata() or {}).get(COMPLEX128, "[]"))
        arrays: dict[str, Array] = {
            name: file.get_tensor(name)
            for name in file.keys()  # noqa: SIM118  # not a mapping
        }
    return arrays | {
        name: np.ascontiguousarray(arrays[name]).view(np.complex128)[..., 0] for name in pairs
    }


def read_array_sets(path: Path) -> list[dict[str, Array]]:
    """The input sets of a .safetensors or .npz file; see `read_samples`.

    Raises:
        SpecError: the file cannot be read, or its keys do not form sets; code CP-SAMPLES.
    """
    try:
        if path.suffix == ".safetensors":
            flat = load_arrays(path)
        elif path.suffix == ".npz":
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                flat = {name: arrays[name] for name in arrays.files}
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


def save_arrays(arrays: Mapping[str, Array], path: Path) -> None:
    """Write a .safetensors file for `load_arrays` and `load_tensors`."""
    pairs = [name for name, array in arrays.items() if array.dtype == np.complex128]
    stored = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    stored |= {
        name: stored[name].view(np.float64).reshape(*stored[name].shape, 2) for name in pairs
    }
    save_file(stored, path, metadata={COMPLEX128: json.dumps(pairs)} if pairs else None)
