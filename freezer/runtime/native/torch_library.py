"""The shared library of the installed torch, called through its C interface. Imports no torch, only
finds it.

The signatures are those of torch/csrc/inductor/aoti_torch/c/shim.h. Functions return 0, or an error
whose text `check` raises.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from freezer.errors import MissingDependencyError, install_command
from freezer.runtime.arrays import Array, dtype_of, name_of
from freezer.spec import DTYPES

LIBRARY = "lib/libtorch_cpu.so"
"""In torch's folder."""

Handle = ctypes.c_void_p

_SIZES = ctypes.POINTER(ctypes.c_int64)
_LONG, _INT = ctypes.c_int64, ctypes.c_int32
_SIGNATURES = {
    "aoti_torch_create_tensor_from_blob_v2": (
        *(Handle, _LONG, Handle, Handle, _LONG),
        *(_INT, _INT, _INT, Handle),
        *(_INT, ctypes.c_char_p, _LONG),
    ),
    "aoti_torch_delete_tensor_object": (Handle,),
    "aoti_torch_get_dim": (Handle, Handle),
    "aoti_torch_get_sizes": (Handle, ctypes.POINTER(_SIZES)),
    "aoti_torch_get_dtype": (Handle, Handle),
    "aoti_torch_copy_": (Handle, Handle, _INT),
}
_SET_THREADS, _GET_THREADS = "_ZN2at15set_num_threadsEi", "_ZN2at15get_num_threadsEv"
"""at::set_num_threads(int) and at::get_num_threads(), which set the counts of OpenMP and MKL for
the calling thread.
"""


def torch_folder() -> Path:
    """The folder of the installed torch.

    Raises:
        MissingDependencyError: torch is not installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(
            f"the payload calls torch's shared libraries, and torch is not installed;"
            f" {install_command('torch')}"
        )
    return Path(spec.submodule_search_locations[0])


def torch_version() -> str:
    """The version of the installed torch: `2.13.0+cpu`; empty if it is not installed.

    Raises:
        MissingDependencyError: it is not whole.
    """
    if importlib.util.find_spec("torch") is None:
        return ""
    path = torch_folder() / "version.py"
    text = path.read_text() if path.is_file() else ""
    match = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    if match is None:
        raise MissingDependencyError(f"{path} names no version of torch; install torch again")
    return match[1]


def text_from(library: ctypes.CDLL, name: str) -> str:
    """The text that a function of a library returns; empty where the library lacks the function, as
    before torch 2.13.
    """
    function = getattr(library, name, None)
    if function is None:
        return ""
    function.restype = ctypes.c_char_p
    return (function() or b"").decode(errors="replace").strip()


class Libtorch:
    """`libtorch_cpu.so` of a torch.

    Attributes:
        library: for further functions.

    Raises:
        MissingDependencyError: it cannot be loaded, or lacks a function.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LIBRARY
        try:
            self.functions = ctypes.CDLL(str(path))
            for name, arguments in _SIGNATURES.items():
                getattr(self.functions, name).argtypes = arguments
            self._set_threads = getattr(self.functions, _SET_THREADS)
            self._get_threads = getattr(self.functions, _GET_THREADS)
            self._dtypes = {self._number_of(name): dtype_of(name) for name in DTYPES}
        except (OSError, AttributeError) as error:
            raise MissingDependencyError(
                f"torch's shared library cannot be used: {error}; install torch again"
            ) from None
        self._create = self.functions.aoti_torch_create_tensor_from_blob_v2

    def check(
        self,
        status: int,
        problem: str,
    ) -> None:
        """Raise if a function returned an error.

        Raises:
            RuntimeError: it did.
        """
        if status != 0:
            cause = text_from(self.functions, "torch_exception_get_what_without_backtrace")
            raise RuntimeError(f"{problem}: {cause or 'torch printed the cause to stderr'}")

    @property
    def num_threads(self) -> int:
        """Intra-op threads of the calling thread."""
        return int(self._get_threads())

    @num_threads.setter
    def num_threads(self, count: int) -> None:
        self._set_threads(ctypes.c_int(count))

    def wrap(self, array: Array) -> Handle:
        """Handle of a tensor on the memory of a C-contiguous array of one of DTYPES, which must
        outlive it.
        """
        strides = [1] * array.ndim
        for axis in reversed(range(array.ndim - 1)):
            strides[axis] = strides[axis + 1] * max(array.shape[axis + 1], 1)
        return self.tensor_at(array.ctypes.data, name_of(array.dtype), array.shape, strides)

    def tensor_at(
        self,
        address: int,
        dtype: str,
        shape: Sequence[int],
        strides: Sequence[int],
        offset: int = 0,
        packed: bytes = b"",
    ) -> Handle:
        """Handle of a tensor on memory that it does not own.

        Args:
            address: address of the memory.
            dtype: torch's name of the dtype.
            shape: sizes of the dims.
            strides: of a plain tensor, in elements; any for a packed one.
            offset: of the first element, in elements.
            packed: oneDNN's description of a packed tensor; empty for a plain one.

        Raises:
            TypeError: torch does not make such a tensor.
        """
        functions = self.functions
        layout = (
            functions.aoti_torch_layout__mkldnn if packed else functions.aoti_torch_layout_strided
        )
        handle = Handle()
        sizes = _LONG * len(shape)
        status = self._create(
            *(address, len(shape), sizes(*shape), sizes(*strides), offset),
            *(self._number_of(dtype), functions.aoti_torch_device_type_cpu(), 0),
            *(ctypes.byref(handle), layout(), packed, len(packed)),
        )
        if status != 0:
            raise TypeError(f"torch makes no tensor of {dtype} {list(shape)}")
        return handle

    def _number_of(self, dtype: str) -> int:
        """Torch's number of a dtype."""
        return int(getattr(self.functions, f"aoti_torch_dtype_{dtype}")())

    def copied(self, handle: Handle) -> Array:
        """A new array with the values of a tensor. A copy, since a tensor may share memory with an
        input, a weight or another.

        Raises:
            RuntimeError: the tensor is too large, or of another dtype than DTYPES.
        """
        num_dims, number, sizes = ctypes.c_int64(), ctypes.c_int32(), _SIZES()
        self.functions.aoti_torch_get_dim(handle, ctypes.byref(num_dims))
        self.functions.aoti_torch_get_dtype(handle, ctypes.byref(number))
        self.check(
            self.functions.aoti_torch_get_sizes(handle, ctypes.byref(sizes)),
            "an output has no sizes",
        )
        if number.value not in self._dtypes:
            raise RuntimeError(
                f"an output has another dtype (torch's number {number.value}) than contracts have"
            )
        array: Array = np.empty(sizes[: num_dims.value], self._dtypes[number.value])
        target = self.wrap(array)
        try:
            self.check(
                self.functions.aoti_torch_copy_(target, handle, 0), "an output cannot be copied"
            )
        finally:
            self.delete(target)
        return array

    def delete(self, handle: Handle) -> None:
        """Free a tensor's handle."""
        self.functions.aoti_torch_delete_tensor_object(handle)


@functools.cache
def libtorch() -> Libtorch:
    """The library of the installed torch.

    Raises:
        MissingDependencyError: torch is not installed, or its library cannot be used.
    """
    return Libtorch(torch_folder())
