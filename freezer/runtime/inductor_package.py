"""Inductor packages: their shared library, and weights beside it that are mapped into memory.
Imports no torch.

torch's own loader unpacks the package and copies the weights, which are then in memory twice. Here
only the library is unpacked, and the uncompressed weights are mapped from the package. Processes
that serve one payload share them; opening takes milliseconds. The package has an extra table of its
constants: position and layout of each. torch's loaders ignore it; packages without it have their
weights in the library.
"""

from __future__ import annotations

import base64
import ctypes
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from freezer.codec import decode
from freezer.errors import IntegrityError
from freezer.files import begin_of, scratch_folder

TABLE = "coldpress-constants.json"
"""Name of the table in a package."""

ALIGNMENT = 64
"""Of each constant, in bytes; the same as Inductor's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightEntry:
    """A constant in the file of weights.

    Attributes:
        name: in the shared library.
        position: in the file, in bytes.
        offset: of the tensor, in elements.
        packed: oneDNN's description of a packed tensor, in base64; None for a plain tensor.
    """

    name: str
    position: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    packed: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightTable:
    """The content of TABLE: the constants in the file of weights, and its size."""

    size_bytes: int
    constants: tuple[WeightEntry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class InductorPackage:
    """An Inductor package.

    Attributes:
        path: the file.
        table: of the weights beside the library; None where they are in it.
        begin: offset of these weights in the file, in bytes.
    """

    path: Path
    table: WeightTable | None
    begin: int = 0

    @contextmanager
    def shared_library(self) -> Iterator[Path]:
        """The shared library as a file, which exists within the block.

        Raises:
            IntegrityError: the package does not have exactly one.
            UsageError: no temporary folder allows code to be loaded from it.
        """
        with zipfile.ZipFile(self.path) as archive, scratch_folder(executable=True) as folder:
            names = [name for name in archive.namelist() if name.endswith((".so", ".json"))]
            libraries = [Path(folder) / Path(name).name for name in names if name.endswith(".so")]
            if len(libraries) != 1:
                raise IntegrityError(
                    f"{self.path.name} has {len(libraries)} shared libraries, expected one; pull"
                    " the artifact again"
                )
            for name in names:
                (Path(folder) / Path(name).name).write_bytes(archive.read(name))
            yield libraries[0]


def read_package(path: Path) -> InductorPackage:
    """Read where a package has its weights.

    Raises:
        IntegrityError: the package is damaged.
    """
    with zipfile.ZipFile(path) as archive:
        found = {info.filename.rpartition("/")[2]: info for info in archive.infolist()}
        if TABLE not in found:
            return InductorPackage(path=path, table=None)
        table = decode(
            WeightTable, json.loads(archive.read(found[TABLE])), origin=f"{path.name}: {TABLE}"
        )
        blobs = [info for name, info in found.items() if name.endswith(".blob")]
        if len(blobs) != 1 or blobs[0].file_size != table.size_bytes:
            raise IntegrityError(
                f"{path.name}: the weights do not match the table; pull the artifact again"
            )
    return InductorPackage(path=path, table=table, begin=begin_of(path, blobs[0]))


def borrowed(library: ctypes.CDLL, address: int, entry: WeightEntry) -> ctypes.c_void_p:
    """Handle of a tensor on memory that it does not own.

    Args:
        library: libtorch_cpu.
        address: of the first weight.
        entry: the tensor.

    Raises:
        TypeError: torch does not make such a tensor.
    """
    packed = entry.packed is not None
    description = base64.b64decode(entry.packed) if entry.packed is not None else b""
    numbers = ctypes.c_int64 * len(entry.shape)
    handle = ctypes.c_void_p()
    status = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(address + entry.position),
        ctypes.c_int64(len(entry.shape)),
        numbers(*entry.shape),
        numbers(*(entry.shape if packed else entry.stride)),  # a packed tensor has no strides
        ctypes.c_int64(entry.offset),
        ctypes.c_int32(getattr(library, f"aoti_torch_dtype_{entry.dtype}")()),
        ctypes.c_int32(library.aoti_torch_device_type_cpu()),
        ctypes.c_int32(0),
        ctypes.byref(handle),
        ctypes.c_int32(
            library.aoti_torch_layout__mkldnn() if packed else library.aoti_torch_layout_strided()
        ),
        description,
        ctypes.c_int64(len(description)),
    )
    if status != 0:
        raise TypeError(
            f"torch makes no tensor {entry.name} of {entry.dtype} {list(entry.shape)} from memory"
        )
    return handle
