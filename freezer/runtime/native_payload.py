"""Open an Inductor payload through AOTInductor's C interface. Imports no torch.

The signatures are those of torch/csrc/inductor/aoti_runtime/interface.h, which the payload's shared
library exports.
"""

from __future__ import annotations

import _ctypes
import ctypes
import mmap
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from freezer.errors import IntegrityError, UsageError
from freezer.runtime.inductor_package import ALIGNMENT, WeightTable, borrowed, read_package
from freezer.runtime.libtorch import Array, Handle, Libtorch, libtorch

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
        RuntimeError, OSError: the library cannot be loaded, or does not make a model.
    """

    def __init__(self, path: Path, num_threads: int, num_inputs: int, num_outputs: int) -> None:
        self._torch = libtorch()
        self._num_threads = num_threads
        self._num_inputs, self._num_outputs = num_inputs, num_outputs
        package = read_package(path)
        with package.shared_library() as library:
            if library.with_suffix(
                ".json"
            ).exists():  # operators without a C function, for torch's `OSSProxyExecutor`
                raise UsageError(
                    f"{path.name} calls operators through torch's dispatcher; load(...,"
                    " runtime='torch')"
                )
            self._library = ctypes.CDLL(str(library))
        self._container = Handle()
        self._handles: list[Handle] = []
        mappings: list[mmap.mmap] = []
        closing = weakref.finalize(
            self, _close, self._torch, self._library, self._container, self._handles, mappings
        )
        closing.atexit = False  # other threads may still run then
        try:
            for name, arguments in _SIGNATURES.items():
                getattr(self._library, name).argtypes = arguments
        except AttributeError as error:
            raise RuntimeError(
                f"{path.name} lacks a function of AOTInductor's interface: {error}"
            ) from None
        self._last_error: Callable[[], bytes] | None = None
        if hasattr(self._library, "AOTInductorGetLastError"):  # from torch 2.13 on
            self._library.AOTInductorGetLastError.restype = ctypes.c_char_p
            self._last_error = self._library.AOTInductorGetLastError
        self._call("CreateWithDevice", ctypes.byref(self._container), 1, b"cpu", None)
        if package.table is not None:
            mappings.append(self._map(path, package.table, package.begin))
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
            for address in outputs:
                if address:
                    self._torch.delete(Handle(address))
            if before != self._num_threads:
                self._torch.num_threads = before

    def _map(self, path: Path, table: WeightTable, begin: int) -> mmap.mmap:
        """Let the model read its weights from the file, whose mapping is returned."""
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), begin + table.size_bytes, access=mmap.ACCESS_COPY)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped)) + begin
        if address % ALIGNMENT:
            raise RuntimeError(f"the weights in {path.name} are not aligned to {ALIGNMENT} bytes")
        for entry in table.constants:
            self._handles.append(borrowed(self._torch.functions, address, entry))
        names = [entry.name.encode() for entry in table.constants]
        pairs = (_Pair * len(names))(
            *(_Pair(name, handle) for name, handle in zip(names, self._handles, strict=True))
        )
        give = getattr(self._library, f"{_PREFIX}UpdateUserManagedConstantBufferPairs")
        give.argtypes = (Handle, Handle, _SIZE, ctypes.c_bool, ctypes.c_bool)
        self._call(
            "UpdateUserManagedConstantBufferPairs", self._container, pairs, len(names), False, True
        )
        return mapped

    def _check_count(self, name: str, expected: int) -> None:
        found = _SIZE()
        self._call(name, self._container, ctypes.byref(found))
        if found.value != expected:  # `Run` would end the process
            raise IntegrityError(
                f"the payload's {name.removeprefix('GetNum').lower()} are {found.value}, and the"
                f" manifest's {expected}"
            )

    def _call(self, name: str, *arguments: object) -> None:
        """Call a function of the payload's library.

        Raises:
            RuntimeError: it returned an error.
        """
        if getattr(self._library, _PREFIX + name)(*arguments) != 0:
            text = self._last_error() if self._last_error is not None else None
            self._torch.check(
                1, f"the payload's {name} failed: {(text or b'').decode(errors='replace').strip()}"
            )


def _close(
    torch: Libtorch,
    library: ctypes.CDLL,
    container: Handle,
    handles: list[Handle],
    mappings: list[mmap.mmap],
) -> None:
    """Delete the model, then the handles of its weights; `mappings` keep the weights until then.

    As with torch's own loader, glibc keeps the code, a few hundred KB, which has unique symbols of
    C++.
    """
    if container:
        getattr(library, f"{_PREFIX}Delete")(container)
    for handle in handles:
        torch.delete(handle)
    _ctypes.dlclose(library._handle)
