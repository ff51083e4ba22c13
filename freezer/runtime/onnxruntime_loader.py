"""Open ONNX payloads with ONNX Runtime, which an extra installs. The package is imported when the
first payload is opened.

The file was optimized at build time without any choice that depends on the CPU. Opening it chooses
the layout of convolutions for the instruction set of this CPU, and packs weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from freezer.errors import MissingDependencyError
from freezer.runtime.devices import CPU

# Read by ONNX Runtime at its import. Otherwise the first session writes an id into the home
# directory and reports to a server.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

OUTPUT_ORDERS = "coldpress.output_orders"
"""Metadata of the file: for each output the order of eager's dims in memory, largest stride first;
None if it is contiguous.
"""

_ERRORS_ONLY = 3
"""ONNX Runtime's level of its log. Warnings are advice for whoever made the file."""


def open_onnxruntime(
    path: Path,
    settings: Mapping[str, Any],
    device: torch.device = CPU,
    *,
    one_at_a_time: bool = False,
) -> Callable[..., list[Tensor]]:
    """Open a file as a session with torch's thread count in this thread; the count stays when
    torch's changes later.

    Several threads may call the runner at once. Its outputs are new tensors, which share no memory
    with the inputs, and have eager's order of dims in memory.

    Raises:
        MissingDependencyError: ONNX Runtime is not installed.
        RuntimeError: ONNX Runtime cannot open the file.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError(
            f"{path.name} needs ONNX Runtime, which cannot be imported ({error}); pip install"
            " 'coldpress[onnxruntime]'"
        ) from error
    options = session_options(settings, torch.get_num_threads())
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        raise RuntimeError(
            f"{path.name}: ONNX Runtime {onnxruntime.__version__} does not open it: {error};"
            " install the version that its manifest names (`coldpress inspect`)"
        ) from error
    return _runner(session)


def session_options(settings: Mapping[str, Any], num_threads: int) -> Any:
    """ONNX Runtime's SessionOptions for a thread count, with the recipe's `session` entries."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = num_threads, 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = _ERRORS_ONLY
    for name, value in settings.get("session", {}).items():
        options.add_session_config_entry(name, value)
    return options


def _runner(session: Any) -> Callable[..., list[Tensor]]:
    inputs, outputs = session.get_inputs(), [item.name for item in session.get_outputs()]
    names = [item.name for item in inputs]
    orders = json.loads(session.get_modelmeta().custom_metadata_map.get(OUTPUT_ORDERS, "null")) or [
        None
    ] * len(outputs)
    moved = [(place, _inverse(order)) for place, order in enumerate(orders) if order is not None]
    numpy_lacks = any(item.type == "tensor(bfloat16)" for item in (*inputs, *session.get_outputs()))
    call = _by_dlpack if numpy_lacks else _by_numpy

    def run(*tensors: Tensor) -> list[Tensor]:
        results = call(session, names, outputs, tensors)
        for place, found in enumerate(results):
            if not found.numel():  # NumPy gives it no strides
                results[place] = torch.empty(found.shape, dtype=found.dtype)
        for place, order in moved:
            results[place] = results[place].permute(order)
        return results

    return run


def _by_numpy(
    session: Any, names: Sequence[str], outputs: Sequence[str], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """Call through NumPy arrays on the same memory, the fastest way into ONNX Runtime from
    Python.
    """
    feeds = {name: tensor.numpy(force=True) for name, tensor in zip(names, tensors, strict=True)}
    return [torch.from_numpy(array) for array in session.run(outputs, feeds)]


def _by_dlpack(
    session: Any, names: Sequence[str], outputs: Sequence[str], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """Call through DLPack, for dtypes that NumPy lacks. Costs about 50 µs more."""
    from onnxruntime import OrtValue

    feeds = {
        name: OrtValue.from_dlpack(tensor.detach())
        for name, tensor in zip(names, tensors, strict=True)
    }
    return [from_dlpack(value) for value in session.run_with_ort_values(outputs, feeds)]


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]
