"""Open Inductor packages; weights beside the shared library are mapped into memory, not copied.

torch's own loader unpacks the package and copies the weights, which are then in memory twice. Here only the library is unpacked,
and the uncompressed weights are mapped from the package. Processes that serve one payload share them; opening takes milliseconds.
The package has an extra table of its constants: position and layout of each. torch's loaders ignore it; packages without it are
opened with torch's loader.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import logging
import os
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freezer.codec import decode
from freezer.errors import IntegrityError
from freezer.files.scratch import scratch_folder, scratch_place
from freezer.runtime.devices import CPU

TABLE = "coldpress-constants.json"
"""Name of the table in a package."""

ALIGNMENT = 64
"""Of each constant, in bytes; the same as Inductor's."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_environment = threading.Lock()

logger = logging.getLogger("coldpress")


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


def open_mapped(path: Path) -> Callable[[list[Tensor]], list[Tensor]] | None:
    """Open a package with a table of weights; None for other packages, and where torch's private bindings have changed.

    The file must not be modified while the runner exists; it may be removed.

    Raises:
        IntegrityError: the package is damaged.
        UsageError: no temporary folder allows code to be loaded from it.
    """
    with zipfile.ZipFile(path) as archive:
        found = {info.filename.rpartition("/")[2]: info for info in archive.infolist()}
        if TABLE not in found:
            return None
        table = decode(WeightTable, json.loads(archive.read(found[TABLE])), origin=f"{path.name}: {TABLE}")
        blobs = [info for name, info in found.items() if name.endswith(".blob")]
        if len(blobs) != 1 or blobs[0].compress_type != zipfile.ZIP_STORED or blobs[0].file_size != table.size_bytes:
            raise IntegrityError(f"{path.name}: the weights do not match the table; pull the artifact again")
        files = {name: archive.read(info) for name, info in found.items() if name.endswith((".so", ".json")) and name != TABLE}
    begin = _begin(path, blobs[0])
    mapped = torch.from_file(str(path), shared=False, size=begin + table.size_bytes, dtype=torch.uint8)
    try:
        runner = _runner(files, mapped.data_ptr() + begin, table)
    except (AttributeError, TypeError) as error:  # a torch with other private bindings
        logger.warning(
            "%s: torch %s cannot map the weights (%s); they are copied, which needs twice their size in memory at load",
            path.name,
            torch.__version__,
            error,
        )
        return None

    def run(tensors: list[Tensor]) -> list[Tensor]:
        outputs: list[Tensor] = runner.run(tensors)
        return outputs

    run.mapped = mapped  # type: ignore[attr-defined]  # the weights do not keep it alive
    return run


def _begin(path: Path, info: zipfile.ZipInfo) -> int:
    """Offset of an uncompressed file's bytes in an archive."""
    with path.open("rb") as file:
        file.seek(info.header_offset)
        _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return int(info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes)


def _runner(files: Mapping[str, bytes], address: int, table: WeightTable) -> Any:
    """Load the shared library, which survives its temporary folder, with its weights at an address."""
    if address % ALIGNMENT:
        raise TypeError(f"not aligned to {ALIGNMENT} bytes")
    with scratch_folder(executable=True) as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(next(Path(folder).glob("*.so"))), 1)
    weights = {entry.name: _borrowed(address + entry.position, entry) for entry in table.constants}
    runner.update_constant_buffer(weights, False, True, True)
    return runner


def _borrowed(address: int, entry: WeightEntry) -> Tensor:
    """A tensor on memory that it does not own.

    torch never frees the handle that it makes for each such constant (`MaybeOwningAtenTensorHandle` of torch 2.13). If the tensor
    owned the mapping, every load would keep a mapping until the process ends.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    packed = entry.packed is not None
    description = base64.b64decode(entry.packed) if entry.packed is not None else b""
    numbers = ctypes.c_int64 * len(entry.shape)
    handle = ctypes.c_void_p()
    status = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(address),
        ctypes.c_int64(len(entry.shape)),
        numbers(*entry.shape),
        numbers(*(entry.shape if packed else entry.stride)),  # a packed tensor has no strides
        ctypes.c_int64(entry.offset),
        ctypes.c_int32(getattr(library, f"aoti_torch_dtype_{entry.dtype}")()),
        ctypes.c_int32(library.aoti_torch_device_type_cpu()),
        ctypes.c_int32(0),
        ctypes.byref(handle),
        ctypes.c_int32(library.aoti_torch_layout__mkldnn() if packed else library.aoti_torch_layout_strided()),
        description,
        ctypes.c_int64(len(description)),
    )
    if status != 0:
        raise TypeError(f"torch makes no tensor {entry.name} of {entry.dtype} {list(entry.shape)} from memory")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    tensor: Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(handle, None, None))
    return tensor


def open_inductor(
    path: Path, settings: Mapping[str, Any], device: torch.device = CPU, *, one_at_a_time: bool = False
) -> Callable[..., list[Tensor]]:
    """Open a package on a device.

    torch._inductor.aoti_load_package compiles a probe for an advisory warning; the loader below it needs no compiler. With
    `one_at_a_time` the runner does not synchronize between calls, as the capture of CUDA graphs requires.
    """
    run_flat = open_mapped(path) if device.type == "cpu" else None
    if run_flat is None:
        index = -1 if device.index is None else device.index
        with _unpacking_to(scratch_place(executable=True)):
            run_flat = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", one_at_a_time, 1, index).run

    def run(*tensors: Tensor) -> list[Tensor]:
        outputs: list[Tensor] = run_flat(list(tensors))
        return outputs

    return run


@contextlib.contextmanager
def _unpacking_to(place: Path) -> Iterator[None]:
    """Set the folder that torch's loader unpacks to; it uses $TMPDIR or /tmp, and keeps the files while the package is open."""
    with _environment:
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = str(place)
        try:
            yield
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before
