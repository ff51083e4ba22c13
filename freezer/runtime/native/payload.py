"""Inductor packages, and calls of their shared library through AOTInductor's C interface. Imports
no torch.

torch's own loader unpacks the package and copies the weights, which are then in memory twice. Here
only the library is unpacked, and the uncompressed weights are mapped from the package. Processes
that serve one payload share them; opening takes milliseconds. The package has an extra table of its
constants: position and layout of each. torch's loaders ignore it; packages without it have their
weights in the library.

The signatures are those of torch/csrc/inductor/aoti_runtime/interface.h, which the payload's shared
library exports.
"""

from __future__ import annotations

import _ctypes
import base64
import ctypes
import json
import mmap
import weakref
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from freezer.codec import decode, frozen
from freezer.errors import IntegrityError, UsageError
from freezer.files import begin_of, scratch_folder
from freezer.runtime.arrays import Array
from freezer.runtime.native.torch_library import (
    Handle,
    Libtorch,
    libtorch,
    text_from,
)

TABLE = "coldpress-constants.json"
"""Name of the table in a package."""

ALIGNMENT = 64
"""Of each constant, in bytes; the same as Inductor's."""


@frozen
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


@frozen
class WeightTable:
    """The content of TABLE: the constants in the file of weights, and its size."""

    size_bytes: int
    constants: tuple[WeightEntry, ...]


@frozen
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
            for name in archive.namelist():
                path = folder / Path(name).name
                if path.suffix in (".so", ".json"):
                    path.write_bytes(archive.read(name))
            libraries = list(folder.glob("*.so"))
            if len(libraries) != 1:
                raise IntegrityError(
                    f"{self.path.name} has {len(libraries)} shared libraries, expected one; pull"
                    " the artifact again"
                )
            yield libraries[0]

    def mapped_weights(self, table: WeightTable) -> tuple[mmap.mmap, int]:
        """Map the weights beside the library: the mapping, which must be kept while they are used,
        and their address.

        Raises:
            TypeError: they are not aligned.
        """
        with self.path.open("rb") as file:
            size = self.begin + table.size_bytes
            mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping)) + self.begin
        if address % ALIGNMENT:
            raise TypeError(f"the weights in {self.path.name} are not aligned to {ALIGNMENT} bytes")
        return mapping, address


def read_package(path: Path) -> InductorPackage:
    """Read where a package has its weights.

    Raises:
        IntegrityError: the package is damaged.
    """
    with zipfile.ZipFile(path) as archive:
        files = {Path(info.filename).name: info for info in archive.infolist()}
        if TABLE not in files:
            return InductorPackage(path=path, table=None)
        document = json.loads(archive.read(files[TABLE]))
        table = decode(WeightTable, document, origin=f"{path.name}: {TABLE}")
        blobs = [info for name, info in files.items() if name.endswith(".blob")]
        if len(blobs) != 1 or blobs[0].file_size != table.size_bytes:
            raise IntegrityError(
                f"{path.name}: the weights do not match the table; pull the artifact again"
            )
    return InductorPackage(
        path=path,
        table=table,
        begin=begin_of(path, blobs[0]),
    )


def weight_capsule(address: int, entry: WeightEntry) -> Any:
    """PyCapsule with a handle of `borrowed`, for torch's bindings in this process."""
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype = ctypes.py_object
    capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return capsule(borrowed(address, entry), None, None)


def borrowed(address: int, entry: WeightEntry) -> Handle:
    """Handle of a weight; `address` is that of the first weight.

    Raises:
        TypeError: torch does not make such a tensor.
    """
    return libtorch().tensor_at(
        address + entry.position,
        entry.dtype,
        entry.shape,
        entry.stride if entry.packed is None else entry.shape,  # a packed tensor has no strides
        entry.offset,
        base64.b64decode(entry.packed or ""),
    )


_PREFIX = "AOTInductorModelContainer"
_SIZE = ctypes.c_size_t
_SIGNATURES = {
    f"{_PREFIX}CreateWithDevice": (Handle, _SIZE, ctypes.c_char_p, ctypes.c_char_p),
    f"{_PREFIX}Delete": (Handle,),
    f"{_PREFIX}Run": (Handle, Handle, _SIZE, Handle, _SIZE, Handle, Handle),
    f"{_PREFIX}GetNumInputs": (Handle, Handle),
    f"{_PREFIX}GetNumOutputs": (Handle, Handle),
}


class _Pair(ctypes.Structure):
    """`AOTInductorConstantMapEntry`."""

    _fields_ = (("name", ctypes.c_char_p), ("handle", Handle))


class NativePayload:
    """An open payload; calls of several threads run one after the other, each with the payload's
    number of threads.

    The weights are mapped from the file, which must not be modified while the payload is open; it
    may be removed.

    Args:
        path: the package.
        num_threads: to run with.
        num_inputs, num_outputs: of the manifest.

    Raises:
        IntegrityError: the package is damaged, or has other inputs or outputs.
        UsageError: it calls operators that have no C interface, or no temporary folder can be used.
        AttributeError, RuntimeError, TypeError, OSError: the library cannot be loaded, or makes no
            model.
    """

    def __init__(self, path: Path, num_threads: int, num_inputs: int, num_outputs: int) -> None:
        self._torch = libtorch()
        self._num_threads = num_threads
        self._num_outputs = num_outputs
        package = read_package(path)
        with package.shared_library() as library:
            operators = library.with_suffix(".json")  # those for torch's `OSSProxyExecutor`
            if operators.exists():
                raise UsageError(
                    f"{path.name} calls operators through torch's dispatcher; load(...,"
                    " runtime='torch')"
                )
            self._library = ctypes.CDLL(str(library))
        self._container = Handle()
        self._handles: list[Handle] = []
        mappings: list[mmap.mmap] = []
        opened = (self._torch, self._library, self._container, self._handles, mappings)
        closing = weakref.finalize(self, _close, *opened)
        closing.atexit = False  # other threads may still run then
        for name, arguments in _SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments
        self._call("CreateWithDevice", ctypes.byref(self._container), 1, b"cpu", None)
        if package.table is not None:
            mapping, address = package.mapped_weights(package.table)
            mappings.append(mapping)
            self._give_weights(package.table, address)
        self._check_count("GetNumInputs", num_inputs)
        self._check_count("GetNumOutputs", num_outputs)

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        """The outputs for C-contiguous inputs in order.

        Raises:
            RuntimeError: the payload's code reports an error.
        """
        handles = [self._torch.wrap(array) for array in arrays]
        inputs = (Handle * len(handles))(*handles)
        outputs = (Handle * self._num_outputs)()
        before = self._torch.num_threads
        if before != self._num_threads:
            self._torch.num_threads = self._num_threads
        try:
            self._call(
                "Run", self._container, inputs, len(handles), outputs, self._num_outputs, None, None
            )  # deletes the inputs
            return [self._torch.copied(Handle(address)) for address in outputs]
        finally:
            for address in set(filter(None, outputs)):  # one tensor may be returned twice
                self._torch.delete(Handle(address))
            if before != self._num_threads:
                self._torch.num_threads = before

    def _check_count(self, name: str, expected: int) -> None:
        found = _SIZE()
        self._call(name, self._container, ctypes.byref(found))
        if found.value != expected:  # `Run` would end the process
            raise IntegrityError(
                f"the payload's {name.removeprefix('GetNum').lower()} are {found.value}, and the"
                f" manifest's {expected}"
            )

    def _give_weights(self, table: WeightTable, address: int) -> None:
        """Let the model read its weights at an address."""
        for entry in table.constants:
            self._handles.append(borrowed(address, entry))
        pairs = (_Pair * len(self._handles))()
        for pair, entry, handle in zip(
            pairs,
            table.constants,
            self._handles,
            strict=True,
        ):
            pair.name, pair.handle = entry.name.encode(), handle
        give = getattr(self._library, f"{_PREFIX}UpdateUserManagedConstantBufferPairs")
        give.argtypes = (Handle, Handle, _SIZE, ctypes.c_bool, ctypes.c_bool)
        self._call(
            "UpdateUserManagedConstantBufferPairs", self._container, pairs, len(pairs), False, True
        )

    def _call(
        self,
        name: str,
        *arguments: object,
    ) -> None:
        """Call a function of the payload's library.

        Raises:
            RuntimeError: it returned an error.
        """
        if getattr(self._library, _PREFIX + name)(*arguments) != 0:
            text = text_from(self._library, "AOTInductorGetLastError")
            self._torch.check(1, f"the payload's {name} failed: {text}")


def _close(
    torch: Libtorch,
    library: ctypes.CDLL,
    container: Handle,
    handles: list[Handle],
    mappings: list[mmap.mmap],
) -> None:
    """Delete the model, then the handles of its weights; `mappings` keep the weights until then.

    As with torch's own loader, glibc keeps the code, a few hundred KB.
    """
    if container:
        getattr(library, f"{_PREFIX}Delete")(container)
    for handle in handles:
        torch.delete(handle)
    _ctypes.dlclose(library._handle)
