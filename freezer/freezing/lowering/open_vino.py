"""OpenVINO: the IR of a program, a graph with its weights that OpenVINO compiles for the CPU at
hand when it is opened.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils._sympy.value_ranges import bound_sympy

from freezer.artifact import FileRef
from freezer.codec import encode
from freezer.errors import BuildError
from freezer.files import scratch_folder
from freezer.freezing.capture import Captured
from freezer.freezing.diagnostics import quiet
from freezer.freezing.lowering.exported_programs import (
    NodeNames,
    check_real,
    decomposed,
    known_names,
    names_in,
    operators_computing,
    output_orders,
    report_before,
    values_named,
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
from freezer.runtime.native import (
    CALLS_FILE,
    GRAPH_FILE,
    SHAPING_FILE,
    EngineCalls,
    import_openvino,
    without_telemetry,
)
from freezer.spec import FLOAT32

if TYPE_CHECKING:
    from openvino import Model

SUFFIX = ".ovir"

_INTEGERS = ("i16", "u16", "i32", "u32", "i64", "u64")
_SMALL = 64
"""Bytes of a constant that may scale sizes, such as Interpolate's."""

_PRODUCTS = (
    "Convolution",
    "Deconvolution",
    "FullyConnected",
    "MatMul",
    "RNNCell",
    "RNNSeq",
    "ScaledDotProductAttention",
    "ScaledDotProductAttentionWithKVCache",
)
"""Kinds of executed nodes that are convolutions or matrix products."""

_PRECISIONS = {"f32": FLOAT32, "u8": "int8", "i8": "int8"}
"""Precisions by OpenVINO's names; others are the same."""

_NO_OPERATORS = ("Parameter", "Result", "Constant")


@build_errors("openvino")
@torch.no_grad()
def build(captured: Captured, path: Path, target: Target, settings: Settings) -> Lowered:
    """Convert a program to OpenVINO's IR, with the ranges of its sizes.

    The file does not depend on the CPU, but its speed does, and OpenVINO cannot be limited to a
    lesser one: under oneDNN's limit, which it reads, matrix products and layer norms still use all
    instructions of the CPU.

    Raises:
        BuildError: calls change buffers (code CP-STATE), the class is not that of this machine
            (codes CP-DEVICE-CLASS and CP-BETTER-CPU), or the program cannot be converted.
    """
    check_stateless(captured)
    check_unlimited(target, "OpenVINO")
    check_real(captured.program)
    check_numbers(captured, in_64_bits=False)
    openvino = import_openvino("a build needs OpenVINO")
    report, phases_s = report_before(captured), Phases()
    with timed(phases_s, "convert"):
        model, calls, names = _converted(captured, openvino)
    computes = settings.get("computes", FLOAT32)
    if computes.startswith("int8"):
        with timed(phases_s, "quantize"):
            model = _quantized(model, calls.inputs, names, captured)
    if computes != FLOAT32:
        with timed(phases_s, "count"):
            products = _products(model, settings, openvino)
            report = with_precisions(report, settings, products, captured.exact)
    with timed(phases_s, "save"):
        weights = _save(model, path, calls, openvino)
    report = replace(report, ops_after=_operators(model), phases_s=phases_s)
    return Lowered(report=report, texts={GRAPH: _text(model)}, weights=weights)


def _converted(captured: Captured, openvino: ModuleType) -> tuple[Model, EngineCalls, NodeNames]:
    """A program as OpenVINO's Model, how to call it, and the source node by name of a value."""
    program = captured.program
    with decomposed(program) as made:
        model = to_openvino(program, openvino)
    calls = EngineCalls(inputs=_inputs_of(program, model), orders=output_orders(program))
    return _with_sizes_and_layouts(program, model, calls, openvino), calls, names_in(made)


def int8_model(captured: Captured) -> tuple[Model, NodeNames]:
    """A program in int8 as OpenVINO's Model, and the source node by name of a value."""
    with torch.no_grad():
        model, calls, names = _converted(captured, import_openvino("a search needs OpenVINO"))
        return _quantized(model, calls.inputs, names, captured), names


def _quantized(model: Model, inputs: Sequence[int], names: NodeNames, captured: Captured) -> Model:
    """The model in int8, without the operators of nodes that stay exact.

    Args:
        model: the converted program.
        inputs: the program's input for each input of the model.
        names: source node by name of a value.
        captured: has the samples, and the nodes that stay exact.

    Raises:
        BuildError: NNCF fails; code CP-PRECISION.
    """
    operators = []
    for op in model.get_ordered_ops():
        if op.get_type_name() not in _NO_OPERATORS:
            name = op.get_friendly_name()
            read = [value.get_node().get_friendly_name() for value in op.input_values()]
            operators.append((name, [*known_names(op.output(0), names), name], read))
    exact = operators_computing(captured.exact, operators, names)

    def arrays(call: Sequence[Tensor]) -> list[Any]:
        return [call[index].numpy() for index in inputs]

    kinds = {op.get_type_name() for op in model.get_ops()}
    is_transformer = "ScaledDotProductAttention" in kinds or {"Softmax", "MVN"} <= kinds
    os.environ.setdefault("NNCF_CI", "1")  # it sends no telemetry then
    with quantizing("nncf"), quiet("nncf"), redirect_stdout(StringIO()):  # it shows its progress
        with without_telemetry():
            import nncf
        return nncf.quantize(
            model,
            nncf.Dataset(list(map(arrays, captured.calibration))),
            subset_size=len(captured.calibration),
            model_type=nncf.ModelType.TRANSFORMER if is_transformer else None,
            ignored_scope=nncf.IgnoredScope(names=exact, validate=False),
        )


def _products(model: Model, settings: Settings, openvino: ModuleType) -> Iterator[Product]:
    """Name and precision of each product that the compiled model runs on this CPU."""
    compiled = openvino.Core().compile_model(model.clone(), "CPU", dict(settings["openvino"]))
    for op in compiled.get_runtime_model().get_ordered_ops():
        info = {name: str(value.value) for name, value in op.get_rt_info().items()}
        if info.get("layerType") in _PRODUCTS:
            name, *_ = info.get("originalLayersNames", op.get_friendly_name()).split(",")
            # `runtimePrecision` may be that of weights, which the kernel converts.
            precision = info["primitiveType"].rpartition("_")[2].lower()
            yield name, _PRECISIONS.get(precision, precision)


def _without_repetitions(program: ExportedProgram) -> ExportedProgram:
    """The program with each output once: the converter fails on a tensor that is returned twice."""
    outputs = program.graph_signature.user_outputs
    if len(set(outputs)) == len(outputs):
        return program
    program = program.run_decompositions({})  # a copy
    specs = program.graph_signature.output_specs
    output = program.graph.output_node()
    nodes = dict(zip(output.args[0], specs, strict=True))
    output.args = (tuple(nodes),)
    specs[:] = nodes.values()
    entry = program.module_call_graph[0].signature
    assert entry is not None, "it is that of the whole program"
    entry.out_spec = pytree.tree_structure(tuple(nodes))
    program.graph_module.recompile()
    return program


def to_openvino(program: ExportedProgram, openvino: ModuleType) -> Model:
    """The program as OpenVINO's Model, with each output once. All of its sizes vary."""
    with quiet("root"):  # the converter warns of operators that this torch lacks
        return openvino.convert_model(_without_repetitions(with_stable_forms(program)))


def _inputs_of(program: ExportedProgram, model: Model) -> tuple[int, ...]:
    """The program's input for each input of the model, which lacks unused ones.

    Raises:
        BuildError: the model has other inputs or outputs than the program.
    """
    signature = program.graph_signature
    names, num_outputs = list(signature.user_inputs), len(set(signature.user_outputs))
    known = [port.names.intersection(names) for port in model.inputs]
    indices = [names.index(min(own)) for own in known if own]
    same_inputs = len(set(indices)) == len(model.inputs)
    if not same_inputs or len(model.outputs) != num_outputs:
        raise BuildError(
            f"the conversion made {len(model.inputs)} inputs and {len(model.outputs)} outputs of"
            f" {len(names)} and {num_outputs}; use inductor-frozen"
        )
    return tuple(indices)


def _with_sizes_and_layouts(
    program: ExportedProgram, model: Model, calls: EngineCalls, openvino: ModuleType
) -> Model:
    """The model for the program's sizes, with outputs of its dtypes and in eager's order of dims in
    memory.
    """
    from openvino import opset13 as ops
    from openvino.frontend.pytorch.utils import pt_to_ov_type_map as types

    values = values_named(program, program.graph_signature.user_inputs)
    sizes = {}
    for position, index in enumerate(calls.inputs):
        dims = [_dimension(size, program, openvino) for size in values[index].shape]
        sizes[position] = openvino.PartialShape(dims)
    model.reshape(sizes)
    names, results = program.graph_signature.user_outputs, []
    by_name = dict(zip(dict.fromkeys(names), model.get_results(), strict=True))
    for name, order, value in zip(names, calls.orders, values_named(program, names), strict=True):
        port = by_name[name].input_value(0)
        dtype = types[str(value.dtype)]
        if port.get_element_type() != dtype:
            port = ops.convert(port, dtype.get_type_name()).output(0)
        if order is not None:
            port = ops.transpose(port, order).output(0)
        results.append(ops.result(port))
    return openvino.Model(
        results,
        model.get_parameters(),
        "frozen",
    )


def _dimension(size: Any, program: ExportedProgram, openvino: ModuleType) -> Any:
    """A size of an input: a number, or the range of one that varies."""
    if isinstance(size, int):
        return openvino.Dimension(size)
    bounds = bound_sympy(size.node.expr, program.range_constraints)
    least = int(bounds.lower) if bounds.lower.is_finite else 0
    most = int(bounds.upper) if bounds.upper.is_finite else -1
    return openvino.Dimension(max(least, 0), most)


def _save(
    model: Model,
    path: Path,
    calls: EngineCalls,
    openvino: ModuleType,
) -> FileRef | None:
    """Write graph and calls as one archive, and the weights, if it has any, into a file that the
    loader maps into memory.
    """
    weights = None
    with scratch_folder(place=path.parent) as scratch:
        graph = scratch / GRAPH_FILE
        openvino.save_model(
            model,
            str(graph),
            compress_to_fp16=False,
        )
        file, shaping = graph.with_suffix(".bin"), b""
        if file.stat().st_size:
            places = _shaping(graph)
            data = np.memmap(file, np.uint8, "r")
            shaping = b"".join(data[at : at + size].tobytes() for at, size in places)
            weights = named_by_digest(file, path.parent)
            calls = replace(calls, weights=Path(weights.path).name, shaping=places)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(zipfile.ZipInfo(GRAPH_FILE), graph.read_bytes())
            archive.writestr(zipfile.ZipInfo(CALLS_FILE), json.dumps(encode(calls)))
            archive.writestr(zipfile.ZipInfo(SHAPING_FILE), shaping)
    return weights


def _shaping(graph: Path) -> tuple[tuple[int, int], ...]:
    """Offset and size of constants that may be shapes, indices or scales of sizes."""
    places = set()
    for data in ElementTree.parse(graph).iterfind(".//layer[@type='Const']/data"):
        offset, size = int(data.attrib["offset"]), int(data.attrib["size"])
        if data.attrib["element_type"] in _INTEGERS or size <= _SMALL:
            places.add((offset, size))
    return tuple(sorted(places))


def _operators(model: Model) -> Counter[str]:
    """Number of OpenVINO's operators by type."""
    kinds = [op.get_type_name() for op in model.get_ops()]
    return Counter(kind for kind in kinds if kind not in _NO_OPERATORS)


def _text(model: Model) -> str:
    """The graph, one operator a line, without the values of its weights."""
    lines = []
    for op in model.get_ordered_ops():
        sources = [value.get_node().get_friendly_name() for value in op.input_values()]
        lines.append(f"{op} <- {', '.join(sources)}\n")
    return "".join(lines)
