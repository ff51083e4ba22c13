"""Open OpenVINO payloads, which an extra installs. The package is imported when the first payload
is opened.

The file is OpenVINO's IR, a graph that fits every CPU. Opening it compiles the graph for the CPU at
hand, and packs weights.
"""

from __future__ import annotations

import json
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freezer.codec import decode
from freezer.errors import ContractError, MissingDependencyError, first_line, install_command
from freezer.files import begin_of
from freezer.runtime.contract import Runner
from freezer.runtime.devices import CPU
from freezer.runtime.loaders.onnxruntime import in_order
from freezer.runtime.native import Array

GRAPH_FILE, WEIGHTS_FILE, CALLS_FILE = "model.xml", "model.bin", "calls.json"
"""Files of a payload, a ZIP archive without compression."""

CACHED = {"CPU_RUNTIME_CACHE_CAPACITY": 100}
"""Compiled kernels that are kept for the sizes that come: with OpenVINO's 5,000, a small convnet
grows by 400 MB over 1,500 sizes.
"""

_TELEMETRY = "openvino_telemetry"
_INT32 = torch.iinfo(torch.int32)
_import = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCalls:
    """The content of CALLS_FILE: how to call the graph.

    Attributes:
        inputs: index of the tensor input for each input of the graph, which has none for an unused
            one.
        orders: for each output the order of eager's dims in memory, largest stride first; None if
            it is contiguous.
    """

    inputs: tuple[int, ...]
    orders: tuple[tuple[int, ...] | None, ...]


def open_openvino(
    path: Path,
    settings: Mapping[str, Any],
    device: torch.device = CPU,
) -> Runner:
    """Compile the graph for torch's thread count in this thread; the count stays when torch's
    changes later.

    Several threads may call the runner at once; the calls run one after the other, as those of
    Inductor do. Outputs are new tensors, which share no memory with the inputs, and have eager's
    order of dims in memory.

    Raises:
        MissingDependencyError: OpenVINO is not installed.
        RuntimeError: OpenVINO cannot open the file.
    """
    openvino = import_openvino(f"{path.name} needs OpenVINO")
    config = {**CACHED, **settings["openvino"], "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    try:
        graph, weights, calls = _read(path)
        core = openvino.Core()
        constants = openvino.Tensor(weights, shared_memory=True)
        model = core.read_model(graph, constants)
        compiled = core.compile_model(model, "CPU", config)
    except Exception as error:
        raise RuntimeError(
            f"{path.name}: OpenVINO {openvino.get_version()} does not open it: {first_line(error)};"
            " install the version that its manifest names (`coldpress inspect`)"
        ) from error
    return _Runner(openvino, compiled, calls, weights)


def import_openvino(why: str) -> ModuleType:
    """Import OpenVINO without its telemetry, which would write into the home directory and report
    to a server.

    Args:
        why: start of the error's message.

    Raises:
        MissingDependencyError: it cannot be imported.
    """
    with without_telemetry():
        try:
            import openvino
        except ImportError as error:
            raise MissingDependencyError(
                f"{why}, which cannot be imported ({error}); {install_command('openvino')}"
            ) from error
    module: ModuleType = openvino
    return module


@contextmanager
def without_telemetry() -> Iterator[None]:
    """Let OpenVINO's packages that the block imports use a stub instead of its telemetry."""
    with _import:
        imported = sys.modules.get(_TELEMETRY)
        sys.modules[_TELEMETRY] = None  # type: ignore[assignment]
        try:
            yield
        finally:
            del sys.modules[_TELEMETRY]
            if imported is not None:
                sys.modules[_TELEMETRY] = imported


def _read(path: Path) -> tuple[str, Array, EngineCalls]:
    """The graph, the weights mapped from the file, and how to call the graph."""
    with zipfile.ZipFile(path) as archive:
        graph = archive.read(GRAPH_FILE).decode()
        document = json.loads(archive.read(CALLS_FILE))
        calls = decode(EngineCalls, document, origin=f"{path.name}: {CALLS_FILE}")
        info = archive.getinfo(WEIGHTS_FILE)
    weights: Array = np.empty(0, np.uint8)
    if info.file_size:
        begin = begin_of(path, info)
        weights = np.memmap(path, np.uint8, "c", begin, (info.file_size,))
    return graph, weights, calls


class _Runner:
    """Calls a compiled graph. It holds one request, with the memory of all intermediate results.

    OpenVINO computes integers in 32 bits, so inputs beyond these are refused rather than changed.
    """

    def __init__(
        self,
        openvino: Any,
        compiled: Any,
        calls: EngineCalls,
        weights: Array,
    ) -> None:
        self._openvino = openvino
        self._request = compiled.create_infer_request()
        self._inputs = calls.inputs
        self._orders = calls.orders
        self._bfloat16 = [port.element_type == openvino.Type.bf16 for port in compiled.outputs]
        self._weights = weights  # the compiled graph may read some of them from the file
        self._lock = threading.Lock()

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        inputs = [self._input(tensors[index]) for index in self._inputs]
        with self._lock:
            self._request.infer(inputs)
            outputs = [self._output(index) for index in range(len(self._orders))]
        pairs = zip(outputs, self._orders, strict=True)
        return [in_order(result, order) for result, order in pairs]

    def _output(self, index: int) -> Tensor:
        """A copy of an output."""
        memory = self._request.get_output_tensor(index).data
        tensor = torch.from_numpy(np.array(memory))
        return tensor.view(torch.bfloat16) if self._bfloat16[index] else tensor

    def _input(self, tensor: Tensor) -> Any:
        """OpenVINO's tensor on the same memory, which the caller keeps until the call ends."""
        tensor = tensor.detach().contiguous()
        if tensor.dtype is torch.bfloat16:
            bits = tensor.view(torch.int16).numpy()
            return self._openvino.Tensor(bits, tensor.shape, self._openvino.Type.bf16)
        array = tensor.numpy()
        if array.dtype == np.int64 and array.size:
            low, high = array.min(), array.max()
            if low < _INT32.min or high > _INT32.max:
                raise ContractError(
                    f"got an integer beyond 32 bits, from {low} to {high}; OpenVINO computes with"
                    " 32 bits"
                )
        return self._openvino.Tensor(array, shared_memory=True)
