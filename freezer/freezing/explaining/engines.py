"""Values of every node that an engine computes: ONNX Runtime and OpenVINO with added outputs, and
TorchScript's graph, matched with the exported program by the names that converters keep.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch.export import ExportedProgram

from freezer.freezing.explaining.matching import absorbed, origin_of
from freezer.freezing.explaining.values import Source
from freezer.runtime.loaders import import_openvino, session_options

if TYPE_CHECKING:
    from onnx import ModelProto
    from openvino import Model

Run = tuple[list[Tensor], dict[str, Tensor]]
"""Outputs of a run, and values by source node."""

_CONV = re.compile(r"^_?conv(olution|\dd)?$")


@contextlib.contextmanager
def decomposed() -> Iterator[list[ExportedProgram]]:
    """Keep the programs that a converter decomposes, the last of which it converts."""
    made: list[ExportedProgram] = []
    decompose = ExportedProgram.run_decompositions

    def kept(program: ExportedProgram, *args: Any, **kwargs: Any) -> ExportedProgram:
        made.append(decompose(program, *args, **kwargs))
        return made[-1]

    with mock.patch.object(ExportedProgram, "run_decompositions", kept):
        yield made


def names_in(program: ExportedProgram) -> dict[str, str]:
    """The source node of each node of a decomposed program."""
    origins = {node.name: origin_of(node) for node in program.graph.nodes}
    return {name: origin for name, origin in origins.items() if origin is not None}


def run_onnx(
    model: ModelProto,
    source: Source,
    names: Mapping[str, str] | None,
    settings: Mapping[str, Any],
    *,
    optimize: bool,
) -> Run:
    """Run an ONNX model.

    Args:
        model, source: a converted model, and the program that it was made from.
        names: source node by name of a value, to return these values as well; None for none.
        settings: the recipe's settings.
        optimize: whether ONNX Runtime optimizes it as at load.
    """
    import onnxruntime
    from onnx import ValueInfoProto

    changed = type(model)()
    changed.CopyFrom(model)
    own = [output.name for output in changed.graph.output]
    made = [name for node in changed.graph.node for name in node.output]
    more = [name for name in made if name in (names or {}) and name not in own]
    changed.graph.output.extend(ValueInfoProto(name=name) for name in more)
    options = session_options(settings, torch.get_num_threads())
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        changed.SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
    )
    inputs = [port.name for port in session.get_inputs()]
    arrays = [tensor.numpy() for tensor in source.inputs]
    results = list(
        map(torch.from_numpy, session.run(None, dict(zip(inputs, arrays, strict=False))))
    )
    named = dict(zip([*own, *more], results, strict=True))
    ordered = {name: named[name] for name in made if name in named}
    return results[: len(own)], _by_source(source, names or {}, ordered)


def run_openvino(
    model: Model,
    source: Source,
    names: Mapping[str, str] | None,
    settings: Mapping[str, Any],
) -> Run:
    """Run an OpenVINO model; see `run_onnx`.

    Added outputs prevent fusions. Where that removes the error, only results that its compiler
    keeps are added.
    """
    openvino = import_openvino("this explanation needs OpenVINO")
    core, config = openvino.Core(), dict(settings["openvino"])
    compiled = core.compile_model(model, "CPU", config)
    if names is None:
        return _called(model, compiled, source, {})
    kept = _kept_operators(compiled)
    for only in (None, kept):
        changed = model.clone()
        changed.add_outputs(_named_ports(changed, names, only))
        run = _called(model, core.compile_model(changed, "CPU", config), source, names)
        if source.fails(run[0]):
            break
    return run


def _called(model: Model, compiled: Any, source: Source, names: Mapping[str, str]) -> Run:
    """Call a compiled model, and read those of its outputs that are the model's, or have names."""
    signature = list(source.signature_inputs)
    feeds = {}
    for port in compiled.inputs:
        [name] = port.get_names() & set(signature)
        feeds[port] = source.inputs[signature.index(name)].numpy()
    request = compiled.create_infer_request()
    request.infer(feeds)
    tensors = []
    named: dict[str, Tensor] = {}
    for index, port in enumerate(compiled.outputs):
        tensors.append(torch.from_numpy(request.get_output_tensor(index).data.copy()))
        for name in known_names(port, names or {}):
            named[name] = tensors[-1]
    ordered = {name: named[name] for name in names or () if name in named}
    return tensors[: len(model.outputs)], _by_source(source, names or {}, ordered)


def known_names(port: Any, names: Mapping[str, str]) -> list[str]:
    """The names of a port that are those of nodes, without the index that OpenVINO adds."""
    plain = [name.partition(":")[0] for name in port.get_names()]
    return [name for name in plain if name in names]


def _kept_operators(compiled: Any) -> set[str]:
    """Names of the operators that are the last of those compiled into one."""
    kept = set()
    for op in compiled.get_runtime_model().get_ordered_ops():
        layers = str(op.get_rt_info()["originalLayersNames"].astype(str))
        kept.add(layers.rpartition(",")[2])
    return kept


def _named_ports(model: Model, names: Mapping[str, str], kept: set[str] | None) -> list[Any]:
    """The named outputs of operators, of all or of those kept."""
    ports = []
    for op in model.get_ordered_ops():
        is_kept = kept is None or op.get_friendly_name() in kept
        if is_kept and op.get_type_name() not in ("Result", "Parameter", "Constant"):
            ports += [port for port in op.outputs() if known_names(port, names)]
    return ports


def run_torchscript(module: Any, source: Source) -> Run:
    """Run the graph of a TorchScript module with the results of its operators as outputs.

    Its operators are matched by their order.
    """
    graph = module.inlined_graph.copy()
    made = [value for node in graph.nodes() for value in node.outputs() if _is_tensor(value)]
    [output] = list(graph.outputs())
    both = graph.create("prim::TupleConstruct", [output, *made], 1)
    both.output().setType(torch._C.TupleType([output.type(), *(value.type() for value in made)]))
    graph.appendNode(both)
    graph.eraseOutput(0)
    graph.registerOutput(both.output())
    graph.eraseInput(0)
    call: Any = torch._C._create_function_from_graph("explained", graph)
    with torch.no_grad():
        results, *values = call(*(tensor.clone() for tensor in source.inputs))
    kinds = [_kind(value.node().kind()) for value in made]
    nodes = [node for node in source.graph.graph.nodes if node.name in source.eager]
    known = {node.name: node for node in nodes}
    own = [_kind(str(node.target)) for node in nodes]
    blocks = difflib.SequenceMatcher(None, own, kinds, autojunk=False).get_matching_blocks()
    matched: dict[str, Tensor] = {}
    for block in blocks:
        for offset in range(block.size):
            matched[nodes[block.a + offset].name] = values[block.b + offset]
    found = {absorbed(known[name], set(matched)).name: value for name, value in matched.items()}
    flat = results if isinstance(results, tuple | list) else (results,)
    return list(flat), found


def _is_tensor(value: Any) -> bool:
    is_tensor = bool(value.type().isSubtypeOf(torch._C.TensorType.get()))
    return is_tensor and str(value.node().kind()).startswith("aten::")


def _kind(operator: str) -> str:
    """The operator's name alone: `conv` of `aten::_convolution` and of `aten.conv2d.default`."""
    name = re.split(r"::|\.", operator)[1] if re.search(r"::|\.", operator) else operator
    return "conv" if _CONV.match(name) else name.rstrip("_")


def _by_source(
    source: Source, names: Mapping[str, str], values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Values by source node: of several the last one of its shape."""
    found = {}
    for name, value in values.items():
        origin = names.get(name)
        if origin in source.eager and source.eager[origin].shape == value.shape:
            found[origin] = value
    return found
