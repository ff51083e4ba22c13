"""Open ONNX payloads with ONNX Runtime, which an extra installs. The package is imported when the
first payload is opened.

The file was optimized at build time without any choice that depends on the CPU. Opening it chooses
the layout of convolutions for the instruction set of this CPU, and packs weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from freezer.errors import MissingDependencyError, first_line, install_command
from freezer.runtime.contract import Runner
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


def open_onnxruntime(path: Path, settings: Mapping[str, Any], device: torch.device = CPU) -> Runner:
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
            f"{path.name} needs ONNX Runtime, which cannot be imported ({error});"
            f" {install_command('onnxruntime')}"
        ) from error
    options = session_options(settings, torch.get_num_threads())
    try:
        session = onnxruntime.InferenceSession(
            str(path),
            options,
            providers=["CPUExecutionProvider"],
        )
    except Exception as error:
        raise RuntimeError(
            f"{path.name}: ONNX Runtime {onnxruntime.__version__} does not open it:"
            f" {first_line(error)}; install the version that its manifest names (`coldpress"
            " inspect`)"
        ) from error
    return _runner(session)


def session_options(
    settings: Mapping[str, Any],
    num_threads: int,
) -> Any:
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


def _runner(session: Any) -> Runner:
    inputs = session.get_inputs()
    outputs = session.get_outputs()
    names = [port.name for port in inputs]
    output_names = [port.name for port in outputs]
    metadata = session.get_modelmeta().custom_metadata_map
    orders = json.loads(metadata.get(OUTPUT_ORDERS, "null")) or [None] * len(outputs)
    types = {port.type for port in (*inputs, *outputs)}
    call = _by_dlpack if "tensor(bfloat16)" in types else _by_numpy  # numpy lacks bfloat16

    def run(*tensors: Tensor) -> list[Tensor]:
        feeds = dict(zip(names, tensors, strict=True))
        results = call(session, feeds, output_names)
        pairs = zip(results, orders, strict=True)
        return [in_order(result, order) for result, order in pairs]

    return run


def in_order(
    result: Tensor,
    order: Sequence[int] | None,
) -> Tensor:
    """An engine's result as a tensor with the strides of eager's.

    Args:
        result: output of an engine, contiguous in memory. NumPy's empty arrays lack strides.
        order: order of eager's dims in memory, largest stride first; None if it is contiguous.
    """
    if not result.numel():
        result = torch.empty(result.shape, dtype=result.dtype)
    if order is None:
        return result
    dims = range(len(order))
    return result.permute([order.index(dim) for dim in dims])


def _by_numpy(
    session: Any,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str],
) -> list[Tensor]:
    """Call through NumPy arrays on the same memory, the fastest way into ONNX Runtime from
    Python.
    """
    feeds = {name: tensor.numpy(force=True) for name, tensor in inputs.items()}
    arrays = session.run(outputs, feeds)
    return [torch.from_numpy(array) for array in arrays]


def _by_dlpack(
    session: Any,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str],
) -> list[Tensor]:
    """Call through DLPack, for dtypes that NumPy lacks. Costs about 50 µs more."""
    from onnxruntime import OrtValue

    feeds = {name: OrtValue.from_dlpack(tensor.detach()) for name, tensor in inputs.items()}
    values = session.run_with_ort_values(outputs, feeds)
    return [from_dlpack(value) for value in values]
