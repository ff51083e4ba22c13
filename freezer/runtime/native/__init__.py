"""Payloads that are called with numpy arrays, without torch in the process: those of ONNX Runtime
and OpenVINO, and Inductor's for CPUs, through C functions of torch's libraries. Imports no torch.

Only this package calls C functions of torch and of payloads (`ctypes`).
"""

from __future__ import annotations

from freezer.runtime.native.engines import (
    CALLS_FILE,
    ENGINE_OPENERS,
    GRAPH_FILE,
    OUTPUT_ORDERS,
    SHAPING_FILE,
    EngineCalls,
    EngineOpener,
    import_openvino,
    session_options,
    without_telemetry,
)
from freezer.runtime.native.model import ArrayModel, checked_array, open_arrays
from freezer.runtime.native.payload import (
    ALIGNMENT,
    TABLE,
    WeightEntry,
    read_package,
    weight_capsule,
)
from freezer.runtime.native.torch_library import libtorch, torch_version

__all__ = [
    "ALIGNMENT",
    "CALLS_FILE",
    "ENGINE_OPENERS",
    "GRAPH_FILE",
    "OUTPUT_ORDERS",
    "SHAPING_FILE",
    "TABLE",
    "ArrayModel",
    "EngineCalls",
    "EngineOpener",
    "WeightEntry",
    "checked_array",
    "import_openvino",
    "libtorch",
    "open_arrays",
    "read_package",
    "session_options",
    "torch_version",
    "weight_capsule",
    "without_telemetry",
]
