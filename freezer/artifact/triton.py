"""An artifact as a model of Triton Inference Server: config.pbtxt beside the payload for one of its
backends.

Triton names tensors as the payload's file does, or by position (`INPUT__0`) where its backend
demands that. Imports no torch.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from freezer.artifact.folder import Artifact, payloads_for_threads, thread_counts_of
from freezer.artifact.manifest import Manifest, Payload, PayloadKind
from freezer.codec import frozen
from freezer.errors import MissingDependencyError, UsageError, install_command
from freezer.files import check_folder
from freezer.spec import OutputSpec, TensorSpec

DATATYPES: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
}
"""Names of dtypes in the open inference protocol; Triton's configuration has `TYPE_` before them.
"""


@frozen
class TritonBackend:
    """A backend of Triton.

    Attributes:
        name, platform: in config.pbtxt.
        file: name of the payload's file.
        threads: parameter with the number of threads of a call.
        parameters: further parameters.
    """

    name: str
    platform: str
    file: str
    threads: str
    parameters: Mapping[str, str]


TRITON_BACKENDS: Mapping[PayloadKind, TritonBackend] = {
    "onnxruntime": TritonBackend(
        name="onnxruntime",
        platform="onnxruntime_onnx",
        file="model.onnx",
        threads="intra_op_thread_count",
        parameters={"inter_op_thread_count": "1"},
    ),
    "openvino": TritonBackend(
        name="openvino",
        platform="",
        file="model.xml",
        threads="INFERENCE_NUM_THREADS",
        parameters={"NUM_STREAMS": "1", "RESHAPE_IO_LAYERS": "YES"},  # else no ranges of sizes
    ),
    "inductor": TritonBackend(
        name="pytorch",
        platform="torch_aoti",
        file="model.pt2",
        threads="INTRA_OP_THREAD_COUNT",
        parameters={"INTER_OP_THREAD_COUNT": "1"},
    ),
}
"""The backend that opens each kind of payload."""

Port = tuple[str, Sequence[int]]
"""Name and sizes of a tensor in a payload's file, -1 for sizes that vary."""


def write_triton(
    artifact: Artifact, dest: Path, *, threads: int | None = None, batch: bool = False
) -> Path:
    """Write a model into a repository of Triton, in a new folder with its name.

    Args:
        artifact: artifact, whose payloads were verified.
        dest: folder of the repository.
        threads: thread count of calls; None: the judged one.
        batch: let Triton join requests along the first dim, up to its largest size.

    Returns:
        config.pbtxt.

    Raises:
        UsageError: Triton cannot serve the artifact, or cannot batch it.
        MissingDependencyError: the engine is missing, which reads the names in its files.
    """
    manifest = artifact.manifest
    if threads is None and manifest.latency is not None:
        threads = manifest.latency.num_threads
    payload = _payload(manifest, threads)
    folder = dest / manifest.model
    check_folder(folder, "the model's folder")
    file = folder / str(manifest.version or 1) / TRITON_BACKENDS[payload.kind].file
    file.parent.mkdir(parents=True)
    try:
        _write_payload(artifact, payload, file)
        tensors = _named(manifest, payload, file)
        max_batch = _max_batch(manifest, payload, tensors) if batch else 0
        config = folder / "config.pbtxt"
        lines = _config(manifest, payload, tensors, max_batch)
        config.write_text("\n".join((*lines, *_parameters(payload, threads), "")))
    except BaseException:
        shutil.rmtree(folder)
        raise
    return config


def _payload(manifest: Manifest, threads: int | None) -> Payload:
    """The payload for a thread count that accepts most sizes.

    Raises:
        UsageError: Triton cannot serve one.
    """
    known = [item for item in manifest.payloads if item.kind in TRITON_BACKENDS]
    if not known:
        raise _refused(
            manifest,
            f"Triton has no backend for payloads of {manifest.recipe.name}, but for"
            f" {', '.join(TRITON_BACKENDS)}; name another --device-class, or freeze with such a"
            " recipe",
        )
    fitting = payloads_for_threads(known, threads or known[0].num_threads or 1)
    if not fitting:
        counts = thread_counts_of(known)
        raise _refused(manifest, f"got --threads {threads}, expected one of {counts}")
    tensors: Sequence[TensorSpec | OutputSpec] = (*manifest.inputs.tensors, *manifest.outputs)
    for spec in tensors:
        if spec.dtype not in DATATYPES:
            raise _refused(manifest, f"{spec.name!r} is {spec.dtype}, which Triton lacks")
    return max(fitting, key=lambda item: sum(len(dim.sizes) for dim in item.dims))


def _refused(manifest: Manifest, problem: str) -> UsageError:
    return UsageError(f"{manifest.model} for {manifest.device_class}: {problem}")


def _write_payload(artifact: Artifact, payload: Payload, file: Path) -> None:
    """Write the files that a backend opens."""
    source, is_xml = artifact.folder / payload.path, file.suffix == ".xml"
    if payload.weights is not None:
        weights = artifact.folder / payload.weights.path
        name = file.with_suffix(".bin").name if is_xml else weights.name
        shutil.copyfile(weights, file.with_name(name))
    if is_xml:
        with zipfile.ZipFile(source) as archive:
            for name in archive.namelist():
                archive.extract(name, file.parent)
    else:
        shutil.copyfile(source, file)


Named = tuple[str, TensorSpec | OutputSpec, Port]
"""`input` or `output`, a tensor of the contract, and the same in the file."""


def _named(manifest: Manifest, payload: Payload, file: Path) -> list[Named]:
    """The inputs and outputs as the backend names them.

    Raises:
        UsageError: the backend cannot serve them.
    """
    inputs: Sequence[TensorSpec] = manifest.inputs.tensors
    orders: object = None
    if payload.kind == "onnxruntime":
        ports, orders = _onnx_ports(file)
    elif payload.kind == "openvino":
        ports = _openvino_ports(file)
        calls = json.loads((file.parent / "calls.json").read_bytes())
        inputs, orders = [inputs[index] for index in calls["inputs"]], calls["orders"]
    else:
        ports = [(f"INPUT__{index}", sizes_of(item.shape)) for index, item in enumerate(inputs)]
        for index, output in enumerate(manifest.outputs):
            ports.append((f"OUTPUT__{index}", [-1] * output.rank))
    named: list[Named] = []
    specs: Sequence[TensorSpec | OutputSpec] = (*inputs, *manifest.outputs)
    for spec, port in zip(specs, ports, strict=True):
        if not port[0] or not (port[1] or payload.kind == "onnxruntime"):
            raise _refused(manifest, f"{spec.name!r} lacks dims or, in {payload.path}, a name")
        named.append(("output" if isinstance(spec, OutputSpec) else "input", spec, port))
    if orders not in (None, [None] * len(manifest.outputs)):
        raise _refused(manifest, f"{payload.path} has outputs with another order of dims: {orders}")
    return named


def sizes_of(shape: Sequence[int | str | None]) -> list[int]:
    """The sizes of a shape, -1 for those that vary."""
    return [size if isinstance(size, int) else -1 for size in shape]


def _engine(name: str) -> Any:
    """The package that reads the names in a file."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # both are read at the import
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"the names in its files are read by {name}, which cannot be imported ({error});"
            f" {install_command(name)}"
        ) from error


def _onnx_ports(file: Path) -> tuple[list[Port], object]:
    """Those of the file, and the orders of its outputs' dims."""
    options = {"providers": ["CPUExecutionProvider"]}
    session = _engine("onnxruntime").InferenceSession(str(file), **options)
    ports = [*session.get_inputs(), *session.get_outputs()]
    orders = session.get_modelmeta().custom_metadata_map.get("coldpress.output_orders", "null")
    return [(port.name, sizes_of(port.shape)) for port in ports], json.loads(orders)


def _openvino_ports(file: Path) -> list[Port]:
    """Those of the graph; a name may be missing."""
    model = _engine("openvino").Core().read_model(str(file))
    ports: list[Port] = []
    for port in (*model.inputs, *model.outputs):
        sizes = [-1 if size.is_dynamic else size.get_length() for size in port.partial_shape]
        ports.append((min(port.names, default=""), sizes))
    return ports


def _max_batch(manifest: Manifest, payload: Payload, tensors: Sequence[Named]) -> int:
    """The largest size of the dim that all tensors begin with.

    Raises:
        UsageError: Triton cannot join requests along it.
    """
    first = {tensor.shape[:1] for tensor in manifest.inputs.tensors}
    for dim in payload.dims:
        varies = all(port[1][:1] == [-1] for _, _, port in tensors)
        if payload.kind == "onnxruntime" and first == {(dim.name,)} and varies and dim.min == 1:
            return dim.max
    raise _refused(
        manifest,
        "--batch needs an ONNX file, where all inputs and outputs begin with one dim from 1",
    )


def _config(
    manifest: Manifest, payload: Payload, tensors: Sequence[Named], max_batch: int
) -> Iterator[str]:
    """The lines of config.pbtxt."""
    backend = TRITON_BACKENDS[payload.kind]
    yield (
        f"# {manifest.device_class}, torch {manifest.needs.torch}: {payload.path}, {payload.digest}"
    )
    yield f"name: {json.dumps(manifest.model)}"
    yield f"backend: {json.dumps(backend.name)}"
    yield f"platform: {json.dumps(backend.platform)}"
    yield f"max_batch_size: {max_batch}"
    for side, spec, (name, sizes) in tensors:
        dims = list(sizes[1:] if max_batch else sizes)
        yield f"{side} [ {{  # {spec.name}"
        yield f"  name: {json.dumps(name)}"
        yield f"  data_type: TYPE_{DATATYPES[spec.dtype]}"
        yield f"  dims: {dims or [1]}"
        if not dims:  # Triton has no scalars
            yield "  reshape: { shape: [ ] }"
        yield "} ]"
    kind = "KIND_GPU" if manifest.needs.cuda else "KIND_CPU"
    yield f"instance_group [ {{ count: 1 kind: {kind} }} ]"
    if max_batch:
        yield "dynamic_batching { }"


def _parameters(payload: Payload, threads: int | None) -> Iterator[str]:
    """The lines of the backend's parameters."""
    backend = TRITON_BACKENDS[payload.kind]
    parameters = dict(backend.parameters)
    if threads is not None:
        parameters[backend.threads] = str(threads)
    if payload.kind == "openvino":
        yield "# This backend computes in bfloat16 on CPUs that have it, not in float32."
    for key, value in parameters.items():
        yield f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}'
