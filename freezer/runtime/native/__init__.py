"""Native runtime: call Inductor payloads for CPUs without torch in the process. Imports no torch.

Only this package calls C functions of torch and of payloads (`ctypes`).
"""

from __future__ import annotations

from freezer.runtime.native.model import NativeModel
from freezer.runtime.native.payload import (
    ALIGNMENT,
    TABLE,
    NativePayload,
    WeightEntry,
    read_package,
    weight_capsule,
)
from freezer.runtime.native.torch_library import Array, libtorch, torch_version

__all__ = [
    "ALIGNMENT",
    "TABLE",
    "Array",
    "NativeModel",
    "NativePayload",
    "WeightEntry",
    "libtorch",
    "read_package",
    "torch_version",
    "weight_capsule",
]
