"""Values of every node that an engine computes: ONNX Runtime and OpenVINO with added outputs,
matched with the exported program by the names that converters keep.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from freezer.freezing.explaining.values import GraphReference, NodeValues, Run
from freezer.freezing.lowering import NodeNames, known_names
from freezer.freezing.recipes import Settings
from freezer.runtime.native import import_openvino, session_options

if TYPE_CHECKING:
    from onnx import ModelProto
    from openvino import Model


def run_onnx(
    model: ModelProto,
    source: GraphReference,
    names: NodeNames,
    settings: Settings,
    *,
    optimize: bool,
) -> Run:
    """Run an ONNX model.

    Args:
        model, source: a converted model, and the program that it was made from.
        names: source node by name of a value, to return these values as well.
        settings: the recipe's settings.
        optimize: whether ONNX Runtime optimizes it as at load.
    """
    import onnxruntime
    from onnx import ValueInfoProto

    changed = deepcopy(model)
    own = [output.name for output in changed.graph.output]
    made = [name for node in changed.graph.node for name in node.output]
    more = [name for name in made if name in names and name not in own]
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
    feeds = dict(zip(inputs, map(Tensor.numpy, source.inputs), strict=False))
    results = [torch.from_numpy(value) for value in session.run(None, feeds)]
    named = dict(zip([*own, *more], results, strict=True))
    ordered = {name: named[name] for name in made if name in named}
    return results[: len(own)], _by_source(source, names, ordered)


def run_openvino(
    model: Model,
    source: GraphReference,
    names: NodeNames,
    settings: Settings,
) -> Run:
    """Run an OpenVINO model; see `run_onnx`.

    Added outputs prevent fusions. Where that removes the error, no values are returned.
    """
    openvino = import_openvino("this explanation needs OpenVINO")
    changed = model.clone()
    for op in changed.get_ordered_ops():
        if names and op.get_type_name() not in ("Result", "Parameter", "Constant"):
            changed.add_outputs([port for port in op.outputs() if known_names(port, names)])
    compiled = openvino.Core().compile_model(changed, "CPU", dict(settings["openvino"]))
    outputs, values = _called(model, compiled, source, names)
    return outputs, values if values and source.fails(outputs) else {}


def _called(model: Model, compiled: Any, source: GraphReference, names: NodeNames) -> Run:
    """Call a compiled model, and read those of its outputs that are the model's, or have names."""
    signature = source.signature_inputs
    feeds = {}
    for port in compiled.inputs:
        [name] = port.get_names() & set(signature)
        feeds[port] = source.inputs[signature.index(name)].numpy()
    request = compiled.create_infer_request()
    request.infer(feeds)
    tensors = []
    named = {}
    for index, port in enumerate(compiled.outputs):
        tensors.append(torch.from_numpy(request.get_output_tensor(index).data.copy()))
        for name in known_names(port, names):
            named[name] = tensors[-1]
    ordered = {name: named[name] for name in names if name in named}
    return tensors[: len(model.outputs)], _by_source(source, names, ordered)


def _by_source(source: GraphReference, names: NodeNames, values: NodeValues) -> dict[str, Tensor]:
    """Values by source node: of several the last one of its shape."""
    found = {}
    for name, value in values.items():
        origin = names.get(name)
        if origin in source.eager and source.eager[origin].shape == value.shape:
            found[origin] = value
    return found
