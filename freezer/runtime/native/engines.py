"""ONNX Runtime and OpenVINO, which extras install: open their payloads, and call them with arrays.
Imports no torch; an engine is imported when its first payload is opened.

Files of ONNX Runtime were optimized at build time without any choice that depends on the CPU, and
those of OpenVINO are its IR, a graph that fits every CPU. Opening them chooses kernels and layouts
for this CPU, and packs weights.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from freezer.artifact import PayloadKind
from freezer.codec import decode, frozen
from freezer.errors import ContractError, MissingDependencyError, first_line, install_command
from freezer.files import begin_of, scratch_folder
from freezer.runtime.arrays import BFLOAT16, Array

# Read by ONNX Runtime at its import. Otherwise the first session writes an id into the home
# directory and reports to a server.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

OUTPUT_ORDERS = "coldpress.output_orders"
"""Metadata of an ONNX file: for each output the order of eager's dims in memory, largest stride
first; None if it is contiguous.
"""

GRAPH_FILE, CALLS_FILE, SHAPING_FILE = "model.xml", "calls.json", "shaping.bin"
"""Files of OpenVINO's payload, a ZIP archive without compression."""

_WEIGHTS_FILE = "model.bin"
"""In payloads of earlier releases."""

_EXTERNAL = "session.model_external_initializers_file_folder_path"

CACHED = {"CPU_RUNTIME_CACHE_CAPACITY": 100}
"""Compiled kernels that are kept for the sizes that come: with OpenVINO's 5,000, a small convnet
grows by 400 MB over 1,500 sizes.
"""

_ERRORS_ONLY = 3
"""ONNX Runtime's level of its log. Warnings are advice for whoever made the file."""

_ONNX_BFLOAT16 = 16
"""ONNX's number of the dtype."""

_TELEMETRY = "openvino_telemetry"
_INT32 = np.iinfo(np.int32)
_DIGEST = "[0-9a-f]{64}"
_import = threading.Lock()

EngineRunner: TypeAlias = Callable[[Sequence[Array]], list[Array]]
"""An open payload of an engine: returns the outputs for contiguous arrays in the manifest's order.
Outputs are new arrays, with eager's order of dims in memory. Several threads may call it at once.
"""


EngineOpener: TypeAlias = Callable[[Path, Mapping[str, Any], int], EngineRunner]
"""Opens a file with the recipe's settings, for a number of threads. MissingDependencyError: the
engine is not installed; RuntimeError: it cannot open the file.
"""


def open_onnxruntime(path: Path, settings: Mapping[str, Any], num_threads: int) -> EngineRunner:
    """Open a file as a session; see EngineOpener."""
    try:
        import onnxruntime
    except ImportError as error:
        raise _missing(f"{path.name} needs ONNX Runtime", "onnxruntime", error) from error
    options = session_options(settings, num_threads)
    with _folder_of_weights(path.parent) as folder:
        graph: str | bytes = str(path)
        if folder is not None:
            options.add_session_config_entry(_EXTERNAL, str(folder))
            graph = path.read_bytes()  # the folder applies to bytes alone, which stay in memory
        try:
            session = onnxruntime.InferenceSession(
                graph, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise _unopened(path, f"ONNX Runtime {onnxruntime.__version__}", error) from error
    return _OnnxRunner(session)


@contextmanager
def _folder_of_weights(payloads: Path) -> Iterator[Path | None]:
    """The folder with the weights that are apart from payloads, under their digests as names; None
    if there are none.

    ONNX Runtime maps them by their path, and refuses links to files of other folders or names: such
    files are copied.
    """
    weights = [file for file in payloads.iterdir() if re.fullmatch(_DIGEST, file.name)]
    if not weights:
        yield None
        return
    real = {file.name: file.resolve() for file in weights}
    folders = {file.parent for file in real.values()}
    if len(folders) == 1 and all(real[name].name == name and real[name].exists() for name in real):
        yield folders.pop()
        return
    with scratch_folder() as scratch:
        for file in weights:
            shutil.copyfile(file, scratch / file.name)
        yield scratch


def _missing(why: str, package: str, error: ImportError) -> MissingDependencyError:
    return MissingDependencyError(
        f"{why}, which cannot be imported ({error}); {install_command(package)}"
    )


def _unopened(path: Path, engine: str, error: Exception) -> RuntimeError:
    return RuntimeError(
        f"{path.name}: {engine} does not open it: {first_line(error)}; install the version that its"
        " manifest names (`coldpress inspect`)"
    )


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


class _OnnxRunner:
    """Calls a session."""

    def __init__(self, session: Any) -> None:
        inputs, outputs = session.get_inputs(), session.get_outputs()
        metadata = session.get_modelmeta().custom_metadata_map
        self._session = session
        self._inputs = [port.name for port in inputs]
        self._outputs = [port.name for port in outputs]
        self._has_bfloat16 = any(port.type == "tensor(bfloat16)" for port in (*inputs, *outputs))
        self._orders = json.loads(metadata.get(OUTPUT_ORDERS, "null")) or [None] * len(outputs)

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        feeds = dict(zip(self._inputs, arrays, strict=True))
        if self._has_bfloat16:
            values = {name: _ort_value(array) for name, array in feeds.items()}
            answers = self._session.run_with_ort_values(self._outputs, values)
            results = [_array_in(value) for value in answers]
        else:
            results = self._session.run(self._outputs, feeds)
        return list(map(_in_order, results, self._orders))


def _in_order(result: Array, order: Sequence[int] | None) -> Array:
    """An engine's contiguous result with the strides of eager's.

    Args:
        result: the result.
        order: order of eager's dims in memory, largest stride first; None if it is contiguous.
    """
    if not result.size:  # empty arrays lack strides, unless they are parts of others
        whole = np.empty([max(size, 1) for size in result.shape], result.dtype)
        result = whole[tuple(map(slice, result.shape))]
    return result if order is None else result.transpose(np.argsort(order))


def _ort_value(array: Array) -> Any:
    """ONNX Runtime's value on the memory of an array."""
    from onnxruntime import OrtValue

    if array.dtype != BFLOAT16:
        return OrtValue.ortvalue_from_numpy(array)
    bits = array.view(np.uint16)
    return OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BFLOAT16)


def _array_in(value: Any) -> Array:
    """A copy of ONNX Runtime's value."""
    if value.data_type() != "tensor(bfloat16)":
        array: Array = value.numpy()
        return array
    bits = np.empty(value.shape(), np.uint16)
    if bits.size:
        ctypes.memmove(bits.ctypes.data, value.data_ptr(), bits.nbytes)
    return bits.view(BFLOAT16)


@frozen
class EngineCalls:
    """The content of CALLS_FILE: how to call the graph.

    Attributes:
        inputs: index of the tensor input for each input of the graph, which has none for an unused
            one.
        orders: for each output the order of eager's dims in memory, largest stride first; None if
            it is contiguous.
        weights: name of the file with the weights, beside the payload; empty if there are none.
        shaping: offset and size of those that may be shapes, indices or scales of sizes, in bytes.
            SHAPING_FILE has them once more: OpenVINO reads the weights while they are verified, and
            a wrong index may end the process.
    """

    inputs: tuple[int, ...]
    orders: tuple[tuple[int, ...] | None, ...]
    weights: str = ""
    shaping: tuple[tuple[int, int], ...] = ()


def open_openvino(path: Path, settings: Mapping[str, Any], num_threads: int) -> EngineRunner:
    """Compile the graph; calls run one after the other, as those of Inductor do. See
    EngineOpener.
    """
    openvino = import_openvino(f"{path.name} needs OpenVINO")
    config = {**CACHED, **settings["openvino"], "INFERENCE_NUM_THREADS": num_threads}
    try:
        graph, weights, calls = _read(path)
        core = openvino.Core()
        constants = openvino.Tensor(weights, shared_memory=True)
        model = core.read_model(graph, constants)
        compiled = core.compile_model(model, "CPU", config)
    except Exception as error:
        raise _unopened(path, f"OpenVINO {openvino.get_version()}", error) from error
    return _OpenvinoRunner(openvino, compiled, calls, weights)


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
            raise _missing(why, "openvino", error) from error
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
        within = [info for info in archive.infolist() if info.filename == _WEIGHTS_FILE]
        shaping = archive.read(SHAPING_FILE) if calls.shaping else b""
    weights: Array = np.empty(0, np.uint8)
    if calls.weights:
        weights = np.memmap(path.with_name(calls.weights), np.uint8, "c")
        here = np.frombuffer(shaping, np.uint8)
        for offset, size in calls.shaping:
            weights[offset : offset + size] = here[:size]
            here = here[size:]
    for info in within:
        if info.file_size:
            weights = np.memmap(path, np.uint8, "c", begin_of(path, info), (info.file_size,))
    return graph, weights, calls


class _OpenvinoRunner:
    """Calls a compiled graph. It holds one request, with the memory of all intermediate results.

    OpenVINO computes integers in 32 bits, so inputs beyond these are refused rather than changed.
    """

    def __init__(self, openvino: Any, compiled: Any, calls: EngineCalls, weights: Array) -> None:
        self._openvino = openvino
        self._request = compiled.create_infer_request()
        self._inputs = calls.inputs
        self._orders = calls.orders
        self._bfloat16 = [port.element_type == openvino.Type.bf16 for port in compiled.outputs]
        self._weights = weights  # the compiled graph may read some of them from the file
        self._lock = threading.Lock()

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        inputs = [self._input(arrays[index]) for index in self._inputs]
        with self._lock:
            self._request.infer(inputs)
            results = [self._output(index) for index in range(len(self._orders))]
        return list(map(_in_order, results, self._orders))

    def _output(self, index: int) -> Array:
        """A copy of an output."""
        array: Array = np.array(self._request.get_output_tensor(index).data)
        return array.view(BFLOAT16) if self._bfloat16[index] else array

    def _input(self, array: Array) -> Any:
        """OpenVINO's tensor on the same memory, which the caller keeps until the call ends."""
        if array.dtype == BFLOAT16:
            bits = array.view(np.int16)
            return self._openvino.Tensor(bits, array.shape, self._openvino.Type.bf16)
        if array.dtype == np.int64 and array.size:
            low, high = array.min(), array.max()
            if low < _INT32.min or high > _INT32.max:
                raise ContractError(
                    f"got an integer beyond 32 bits, from {low} to {high}; OpenVINO computes with"
                    " 32 bits"
                )
        return self._openvino.Tensor(array, shared_memory=True)


ENGINE_OPENERS: Mapping[PayloadKind, EngineOpener] = {
    "onnxruntime": open_onnxruntime,
    "openvino": open_openvino,
}
