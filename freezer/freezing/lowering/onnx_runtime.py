"""ONNX Runtime: an ONNX file, optimized ahead of time as far as that does not depend on the CPU."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from freezer.artifact import FileRef
from freezer.files import scratch_folder
from freezer.freezing.capture import Captured
from freezer.freezing.diagnostics import quiet
from freezer.freezing.lowering.exported_programs import (
    NodeNames,
    check_real,
    decomposed,
    names_in,
    operators_computing,
    output_orders,
    report_before,
)
from freezer.freezing.lowering.lowered import (
    GRAPH,
    Lowered,
    Phases,
    Product,
    build_errors,
    check_stateless,
    named_by_digest,
    quantizing,
    timed,
    with_precisions,
)
from freezer.freezing.lowering.stable_forms import check_numbers, with_stable_forms
from freezer.freezing.recipes import Settings
from freezer.freezing.target import Target, check_unlimited
from freezer.runtime.native import ALIGNMENT, OUTPUT_ORDERS, session_options
from freezer.spec import FLOAT32

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

SUFFIX = ".onnx"

_LARGE_BYTES = 1024
"""Least size of a weight that is moved out of the file, as onnx does it by default."""

_INTEGERS = (6, 7)
"""ONNX's numbers of int32 and int64: they may be shapes and indices, which engines interpret."""

_PRODUCTS = ("Conv", "ConvTranspose", "MatMul", "Gemm")

_INTEGER_PRODUCTS = (
    "QLinearConv",
    "QLinearConvTranspose",
    "QLinearMatMul",
    "QGemm",
    "MatMulIntegerToFloat",
    "ConvInteger",
    "MatMulInteger",
    "QAttention",
)
"""Operators that compute convolutions and matrix products, and those that do in int8."""


@build_errors("onnxruntime")
def build(captured: Captured, path: Path, target: Target, settings: Settings) -> Lowered:
    """Convert a program to ONNX and optimize it with ONNX Runtime at the level "extended".

    The level above it, which the loader applies, chooses layouts for the instruction set at hand.

    Raises:
        BuildError: calls change buffers (code CP-STATE), the class is not that of this machine
            (codes CP-DEVICE-CLASS and CP-BETTER-CPU), or the program cannot be converted, such as
            one with over 2 GB of weights.
    """
    check_stateless(captured)
    check_unlimited(target, "ONNX Runtime")
    check_real(captured.program)
    check_numbers(captured, in_64_bits=True)
    report, phases_s = report_before(captured), Phases()
    orders = output_orders(captured.program)
    with timed(phases_s, "convert"), decomposed(captured.program) as made:
        model = to_onnx(captured.program)
    computes = settings.get("computes", FLOAT32)
    if computes != FLOAT32:
        with timed(phases_s, "quantize"):
            model = _quantized(model, names_in(made), captured, path.parent)
    _lay_out(model, orders)
    with timed(phases_s, "optimize"):
        model = optimized(model, path.parent, settings)
    if computes != FLOAT32:
        report = with_precisions(report, settings, _products(model.graph), captured.exact)
    model.metadata_props.add(key=OUTPUT_ORDERS, value=json.dumps(orders))
    weights = _weights_apart(model, path.parent)
    path.write_bytes(model.SerializeToString())
    report = replace(report, ops_after=_operators(model.graph), phases_s=phases_s)
    return Lowered(report=report, texts={GRAPH: _text(model)}, weights=weights)


def to_onnx(program: torch.export.ExportedProgram) -> ModelProto:
    """The program as an ONNX ModelProto."""
    with (
        quiet("torch.onnx", "onnx_ir", "onnxscript"),
        torch.no_grad(),
    ):  # with gradients attention is decomposed into operators whose results have other strides
        made = torch.onnx.export(
            with_stable_forms(program),
            dynamo=True,
            verbose=False,
        )
    assert made is not None, "it is returned if no file is named"
    return made.model_proto


def _quantized(model: ModelProto, names: NodeNames, captured: Captured, folder: Path) -> ModelProto:
    """The model with quantized convolutions and matrix products, and in convnets what is between
    them: softmax and norms of transformers lose too much.

    Args:
        model: the converted program.
        names: source node by name of a value.
        captured: has the samples, and the nodes that stay exact.
        folder: an existing folder for temporary files.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    kinds = _operators(model.graph)
    is_transformer = kinds["Softmax"] and kinds["LayerNormalization"]
    inputs = [port.name for port in model.graph.input]
    calls = [map(Tensor.numpy, call) for call in captured.calibration]
    feeds = (dict(zip(inputs, call, strict=True)) for call in calls)
    with quantizing("onnxruntime"), scratch_folder(place=folder) as scratch, quiet("root"):
        prepared, target = scratch / "prepared.onnx", scratch / "quantized.onnx"
        source = scratch / "converted.onnx"
        source.write_bytes(model.SerializeToString())
        # The program has all shapes, and the symbolic inference fails for some models.
        quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
        operators = [(node.name, node.output, node.input) for node in _loaded(prepared).graph.node]
        quantize_static(
            str(prepared),
            str(target),
            SimpleNamespace(get_next=partial(next, feeds, None)),  # a CalibrationDataReader
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=list(_PRODUCTS) if is_transformer else None,
            nodes_to_exclude=operators_computing(captured.exact, operators, names),
        )
        return _loaded(target)


def _products(graph: GraphProto) -> Iterator[Product]:
    """Name and precision of each product of an optimized graph."""
    for node in graph.node:
        if node.op_type in _PRODUCTS or node.op_type.startswith("Fused"):
            yield node.name, FLOAT32
        elif node.op_type in _INTEGER_PRODUCTS:
            yield node.name, "int8"


def _lay_out(model: ModelProto, orders: Sequence[Sequence[int] | None]) -> None:
    """Let the file return each output in eager's order of dims in memory.

    The loader gives the dims their places again.
    """
    from onnx import helper

    for output, order in zip(model.graph.output, orders, strict=True):
        if order is None:
            continue
        source, output.name = output.name, f"{output.name}_laid_out"
        model.graph.node.append(helper.make_node("Transpose", [source], [output.name], perm=order))
        shape = output.type.tensor_type.shape
        dims = list(shape.dim)
        shape.dim.extend([dims[index] for index in order])
        del shape.dim[: len(dims)]


def optimized(model: ModelProto, folder: Path, settings: Settings) -> ModelProto:
    """The model after ONNX Runtime's optimizations that hold on every CPU."""
    import onnxruntime

    with scratch_folder(place=folder) as scratch:
        target = scratch / "optimized.onnx"
        options = session_options(settings, 1)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(target)
        onnxruntime.InferenceSession(
            model.SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
        )
        return _loaded(target)


def _weights_apart(model: ModelProto, folder: Path) -> FileRef | None:
    """Move the weights of a model, but for integers and small ones, into a file that ONNX Runtime
    maps, in the form of ONNX's external data; None without any.
    """
    from onnx.external_data_helper import set_external_data

    weights = (item for item in model.graph.initializer if item.data_type not in _INTEGERS)
    tensors = [item for item in weights if len(item.raw_data) >= _LARGE_BYTES]
    if not tensors:
        return None
    begins = []
    with scratch_folder(place=folder) as scratch:
        file = scratch / "weights"
        with file.open("wb") as target:
            for tensor in tensors:
                target.seek(-target.tell() % ALIGNMENT, os.SEEK_CUR)
                begins.append(target.tell())
                target.write(tensor.raw_data)
        made = named_by_digest(file, folder)
    name = Path(made.path).name
    for tensor, begin in zip(tensors, begins, strict=True):
        set_external_data(tensor, name, begin, len(tensor.raw_data))
        tensor.ClearField("raw_data")
    return made


def _loaded(path: Path) -> ModelProto:
    import onnx

    return onnx.load(str(path))


def _operators(graph: GraphProto) -> Counter[str]:
    """Number of operators by kind in a graph and in its branches and loops: `Conv`,
    `com.microsoft.FusedConv`.
    """
    found: Counter[str] = Counter()
    for node in graph.node:
        found[f"{node.domain}.{node.op_type}" if node.domain else node.op_type] += 1
        for item in node.attribute:
            for inner in (item.g, *item.graphs):
                found += _operators(inner)
    return found


def _text(model: ModelProto) -> str:
    """The graph, with the names and shapes of its weights. Removes the weights from the model."""
    from onnx import printer

    weights = "".join(f"# {item.name} {list(item.dims)}\n" for item in model.graph.initializer)
    del model.graph.initializer[:]
    return f"{printer.to_text(model)}\n\n# weights\n{weights}"
