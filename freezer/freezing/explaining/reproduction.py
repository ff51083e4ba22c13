"""A short file that reproduces the error of a node with torch or an engine alone."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import torch
from torch.fx import Graph, GraphModule, Node

from freezer.artifact import PayloadKind
from freezer.artifact.explanation import NodeScore
from freezer.freezing.explaining.values import GraphReference

_ENGINES: dict[PayloadKind, str] = {
    "inductor": """
        program = torch.export.export(part, inputs)
        options = {"freezing": True}
        package = torch._inductor.aoti_compile_and_package(program, inductor_configs=options)
        result = torch._inductor.aoti_load_package(package)(*inputs)
        """,
    "onnxruntime": """
        import onnxruntime

        model = torch.onnx.export(part, inputs, dynamo=True).model_proto.SerializeToString()
        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        names = [port.name for port in session.get_inputs()]
        feeds = {name: value.numpy() for name, value in zip(names, inputs)}
        result = torch.from_numpy(session.run(None, feeds)[0])
        """,
    "openvino": """
        import openvino

        model = openvino.convert_model(torch.export.export(part, inputs))
        config = {"INFERENCE_PRECISION_HINT": "f32", "EXECUTION_MODE_HINT": "ACCURACY"}
        run = openvino.compile_model(model, "CPU", config)
        result = torch.from_numpy(run([value.numpy() for value in inputs])[0])
        """,
}

_FILE = '''\
"""Reproduce an error of {engine}: {operator}{line}.

Needs {tensors} beside it, and neither Coldpress nor the model.
"""

from pathlib import Path

import torch
from torch import device, inf, nan  # noqa: F401

saved = torch.load(Path(__file__).with_name("{tensors}"), weights_only=True)
inputs = tuple(saved["inputs"])


class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, value in saved["weights"].items():
            self.register_buffer(name, value)

{code}

part = Part().eval()
with torch.no_grad():
    eager = part(*inputs)
{run}
    wide = [value.double() if value.is_floating_point() else value for value in inputs]
    exact = part.double()(*wide)

error = (result.double() - exact).square().mean().sqrt()
native = (eager.double() - exact).square().mean().sqrt()
floor = max(native, torch.finfo(eager.dtype).eps * exact.square().mean().sqrt())
print(f"error ratio {{error / floor:.3g}}, expected at most {limit:g}")
assert error <= {limit:g} * floor
'''


def folded_before(source: GraphReference, nodes: Sequence[NodeScore], name: str) -> Node | None:
    """The operator that a node was folded into: its first operand, if that has no result of its own
    and no other user; else None.
    """
    scored = {node.node for node in nodes}
    [node] = [node for node in source.graph.graph.nodes if node.name == name]
    before = node.args[0] if node.args else None
    if not isinstance(before, Node) or before.op != "call_function":
        return None
    return before if before.name not in scored and len(before.users) == 1 else None


def write_reproduction(
    file: Path,
    source: GraphReference,
    nodes: Sequence[NodeScore],
    guilty: NodeScore,
    kind: PayloadKind,
    limit: float,
) -> None:
    """Write a file that runs a node, with those folded into it, on the reference's inputs; it fails
    where the error ratio exceeds a limit.

    Args:
        file: the file; its tensors are written beside it, with the suffix `.pt`.
        source: values of the exported program.
        nodes: scores of the nodes.
        guilty: score of the node.
        kind: kind of the payload, which names the engine.
        limit: largest error ratio that passes.
    """
    if kind not in _ENGINES:
        return
    part = [node for node in source.graph.graph.nodes if node.name == guilty.node]
    while (before := folded_before(source, nodes, part[0].name)) is not None:
        part.insert(0, before)
    module, inputs = _module_of(source, part)
    tensors = file.with_suffix(".pt")
    torch.save({"inputs": inputs, "weights": dict(module.named_buffers())}, tensors)
    text = _FILE.format(
        engine=kind,
        operator=guilty.operator,
        line=f" at {guilty.line}" if guilty.line else "",
        tensors=tensors.name,
        code=textwrap.indent(module.code.strip(), " " * 4),
        run=textwrap.indent(textwrap.dedent(_ENGINES[kind]).strip(), " " * 4),
        limit=limit,
    )
    file.write_text(text)


def _module_of(
    source: GraphReference, part: Sequence[Node]
) -> tuple[GraphModule, list[torch.Tensor]]:
    """Some nodes of the exported program as a module, and its inputs: the reference's values."""
    graph, copies, inputs = Graph(), dict[Node, Node](), list[torch.Tensor]()
    root = torch.nn.Module()
    names = [node.name for node in source.graph.graph.find_nodes(op="placeholder")]
    given = dict(zip(names, source.inputs, strict=True))
    outside = dict.fromkeys(each for node in part for each in node.all_input_nodes)
    for node in sorted(outside, key=lambda each: each.op == "get_attr"):  # inputs come first
        if node.op == "get_attr":
            value = attrgetter(str(node.target))(source.graph)
            root.register_buffer(node.name, torch.as_tensor(value).detach().clone())
            copies[node] = graph.get_attr(node.name)
        elif node not in part:
            copies[node] = graph.placeholder(node.name)
            if node.name in given:
                inputs.append(given[node.name])
            else:
                inputs.append(source.exact[node.name].to(source.eager[node.name].dtype))
    for node in part:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[part[-1]])
    return GraphModule(root, graph), inputs
