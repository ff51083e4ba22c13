"""Faults in the forms of a model between its export and what runs, each in one operator of one of
eight small architectures.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn import functional as F  # noqa: N812

from freezer.artifact.explanation import Explanation
from freezer.freezing.drift import Reference, run_reference
from freezer.freezing.explaining import explain_recipe, stages
from freezer.freezing.lowering import origin_of
from freezer.freezing.models import Subject
from freezer.runtime.loaders import torchscript_deprecations_silenced
from tests.support.mutated_models import ARCHITECTURES, Architecture
from tests.support.steps import random_inputs, subject_of, target_of

aten, prims = torch.ops.aten, torch.ops.prims

FREEZING, POST_GRAD, DECOMPOSITION, CODE = "freezing", "post-grad", "decomposition", "code"
"""Where Inductor gets a fault."""


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        model: name of the architecture.
        node: node of the exported program that is computed wrongly.
        kind: key of GRAPH_CHANGES, ONNX_CHANGES or another table.
        recipe: recipe whose stages get it.
        place: where Inductor gets it.
    """

    model: str
    node: str
    kind: str
    recipe: str = "inductor-frozen"
    place: str = FREEZING

    def __str__(self) -> str:
        place = f" ({self.place})" if self.recipe.startswith("inductor") else ""
        return f"{self.recipe}{place}: {self.model}: {self.node}: {self.kind}"


Change = Callable[[list[Node], Graph], bool]
"""Changes the nodes of one operator in a graph; returns whether it could."""


def _convert(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    converted = graph.call_function(prims.convert_element_type.default, (node, dtype))
    converted.meta = {**node.meta, "val": node.meta["val"].to(dtype)}
    return converted


def _round(own: list[Node], graph: Graph) -> bool:
    """Round the result to bfloat16."""
    last = own[-1]
    users = list(last.users)
    with graph.inserting_after(last):
        rounded = _convert(graph, last, torch.bfloat16)
    with graph.inserting_after(rounded):
        widened = _convert(graph, rounded, last.meta["val"].dtype)
    for user in users:
        user.replace_input_with(last, widened)
    return True


def _constants(own: list[Node]) -> Iterator[tuple[Node, Node]]:
    """Constants that nodes read, also through a view, each with the node that reads it."""
    for node in own:
        for operand in node.all_input_nodes:
            if operand.op == "get_attr":
                yield node, operand
            inner = operand.all_input_nodes
            if operand not in own and [each.op for each in inner] == ["get_attr"]:
                yield operand, inner[0]


def _change_constant(own: list[Node], graph: Graph) -> bool:
    """Change some elements of a weight."""
    module: Any = graph.owning_module
    for node, constant in _constants(own):
        value = operator.attrgetter(str(constant.target))(module)
        if value.layout is not torch.strided or not value.is_floating_point() or value.numel() < 4:
            continue
        changed = value.detach().clone(memory_format=torch.contiguous_format)
        changed.view(-1)[: value.numel() // 4] *= 1.1
        module.register_buffer("planted", changed)
        with graph.inserting_before(node):
            planted = graph.get_attr("planted")
        planted.meta = dict(constant.meta)
        node.replace_input_with(constant, planted)
        return True
    return False


def _change_epsilon(own: list[Node], graph: Graph) -> bool:
    for node in own:
        if node.target is aten.add.Tensor and isinstance(node.args[1], float):
            node.update_arg(1, 1e-2)
            return True
    return False


def _swap(own: list[Node], graph: Graph) -> bool:
    """Swap the inputs of a subtraction, a division or a concatenation."""
    for node in own:
        if node.target in (aten.sub.Tensor, aten.div.Tensor):
            node.args = (node.args[1], node.args[0], *node.args[2:])
            return True
        if node.target is aten.cat.default:
            operands: Any = node.args[0]
            node.update_arg(0, list(reversed(operands)))
            return True
    return False


_KERNELS = {
    aten.erf.default: aten.tanh.default,
    aten.tanh.default: aten.sin.default,
    aten.sigmoid.default: aten.tanh.default,
    aten.exp.default: aten.exp2.default,
    aten.rsqrt.default: aten.reciprocal.default,
    aten.relu.default: aten.abs.default,
    aten.add.Tensor: aten.sub.Tensor,
    aten.expm1.default: aten.sin.default,
}


def _other_kernel(own: list[Node], graph: Graph) -> bool:
    for node in own:
        if node.target in _KERNELS:
            node.target = _KERNELS[node.target]
            return True
    return False


def _lose_mask(own: list[Node], graph: Graph) -> bool:
    """Take all keys of attention, as if there were no mask."""
    for node in own:
        if "attn_mask" in node.kwargs:
            node.kwargs = {**node.kwargs, "attn_mask": None}
            return True
        if node.target is aten.where.self:
            node.args = (node.args[0], node.args[2], node.args[1])
            return True
    return False


GRAPH_CHANGES: dict[str, Change] = {
    "reduced precision": _round,
    "wrong constant": _change_constant,
    "wrong epsilon": _change_epsilon,
    "swapped inputs": _swap,
    "wrong kernel": _other_kernel,
    "wrong mask": _lose_mask,
}


@contextlib.contextmanager
def _in_inductor(fault: Fault) -> Iterator[None]:
    """Change a graph once, after one of Inductor's functions."""
    from torch._inductor import freezing
    from torch._inductor.fx_passes import joint_graph, post_grad

    module, name = {
        DECOMPOSITION: (joint_graph, "canonicalize_aten_ir_passes"),
        FREEZING: (freezing, "constant_fold"),
        POST_GRAD: (post_grad, "reorder_for_locality"),
    }[fault.place]
    run: Any = getattr(module, name)
    change, done = GRAPH_CHANGES[fault.kind], list[bool]()

    def wrong(target: Any, *args: Any) -> Any:
        result = run(target, *args)
        graph = getattr(target, "graph", target)
        own = [node for node in graph.nodes if origin_of(node) == fault.node]
        own = [node for node in own if node.op == "call_function"]
        if own and not done and change(own, graph):
            done.append(True)
            graph.owning_module.recompile()
        return result

    with mock.patch.object(module, name, wrong):
        yield
    assert done, f"{fault} was not planted"


_WRONG_CODE = {
    "tanh": (aten.tanh.default, aten.sin.default),
    "sigmoid": (aten.sigmoid.default, aten.tanh.default),
}


@contextlib.contextmanager
def _in_code(fault: Fault) -> Iterator[None]:
    """Let Inductor generate the code of another operator."""
    from torch._inductor import lowering

    right, wrong = _WRONG_CODE[fault.node]
    with mock.patch.dict(lowering.lowerings, {right: lowering.lowerings[wrong]}):
        yield


@torch.library.custom_op("planted::squash", mutates_args=())
def squash(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A weighted norm."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@squash.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


def _squash(
    x: Tensor, weight: Tensor, eps: float, *, times: float = 1.0, power: float = 0.5
) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps) ** power * (weight * times)


CUSTOM_KERNELS: dict[str, Callable[..., Tensor]] = {
    "wrong kernel of a custom operator": lambda x, w, eps: _squash(x, w, eps, power=0.45),
    "wrong epsilon of a custom operator": lambda x, w, eps: _squash(x, w, eps + 1e-2),
    "wrong constant of a custom operator": lambda x, w, eps: _squash(x, w, eps, times=1.01),
}


class Custom(nn.Module):
    """Linear layers with an operator of the model's own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.weight = nn.Parameter(torch.rand(32))

    def forward(self, x: Tensor) -> Tensor:
        squashed: Tensor = squash(F.silu(self.first(x)), self.weight, 1e-5)
        return torch.tanh(self.last(squashed))


@contextlib.contextmanager
def _in_custom_operator(fault: Fault) -> Iterator[None]:
    from torch._inductor import compile_fx

    table = compile_fx.select_decomp_table
    kernel = {torch.ops.planted.squash.default: CUSTOM_KERNELS[fault.kind]}
    with mock.patch.object(compile_fx, "select_decomp_table", return_value={**table(), **kernel}):
        yield


def _in_onnx(fault: Fault, model: Any) -> None:
    """Change the node of an ONNX model that a kind names: `wrong epsilon LayerNormalization 0`."""
    from onnx import helper, numpy_helper

    change, _, number = fault.kind.rpartition(" ")
    change, _, kind = change.rpartition(" ")
    node = [node for node in model.graph.node if node.op_type == kind][int(number)]
    if change == "wrong epsilon":
        [epsilon] = [item for item in node.attribute if item.name == "epsilon"]
        epsilon.f = 1e-2
    elif change == "swapped inputs":
        node.input[:] = [node.input[1], node.input[0], *node.input[2:]]
    elif change == "wrong kernel":
        node.op_type = {"Tanh": "Sin", "Sigmoid": "Tanh", "Relu": "Abs", "Elu": "Selu"}[kind]
        del node.attribute[:]
    elif change == "reduced precision":
        [name] = node.output
        node.output[0] = "planted"
        place = list(model.graph.node).index(node) + 1
        nodes = [
            helper.make_node("Cast", ["planted"], ["planted_half"], to=10),
            helper.make_node("Cast", ["planted_half"], [name], to=1),
        ]
        for offset, made in enumerate(nodes):
            model.graph.node.insert(place + offset, made)
    else:
        constants = {item.name: item for item in model.graph.initializer}
        [first, *_] = [constants[name] for name in node.input if name in constants]
        value = numpy_helper.to_array(first).copy()
        value.reshape(-1)[: value.size // 4] *= 1.1
        first.CopyFrom(numpy_helper.from_array(value, first.name))


def _in_openvino(fault: Fault, model: Any) -> None:
    """Change the operator of an OpenVINO model that a kind names, likewise."""
    from openvino import opset13 as ops

    change, _, number = fault.kind.rpartition(" ")
    change, _, kind = change.rpartition(" ")
    op = [op for op in model.get_ordered_ops() if op.get_type_name() == kind][int(number)]
    if change == "wrong constant":
        [place] = [
            index
            for index, value in enumerate(op.input_values())
            if value.get_node().get_type_name() == "Constant" and index == 1
        ]
        value = op.input_value(place).get_node().data.copy()
        value.reshape(-1)[: value.size // 4] *= 1.1
        op.input(place).replace_source_output(ops.constant(value).output(0))
    else:
        sources = list(op.input_values())
        op.input(0).replace_source_output(sources[1])
        op.input(1).replace_source_output(sources[0])


@contextlib.contextmanager
def _in_converter(name: str, change: Callable[[Fault, Any], None], fault: Fault) -> Iterator[None]:
    convert: Any = getattr(stages, name)

    def wrong(*args: Any) -> Any:
        model = convert(*args)
        change(fault, model)
        return model

    with mock.patch.object(stages, name, wrong):
        yield


def planted(fault: Fault) -> contextlib.AbstractContextManager[None]:
    """Plant a fault."""
    if fault.recipe == "onnxruntime":
        return _in_converter("to_onnx", _in_onnx, fault)
    if fault.recipe == "openvino":
        return _in_converter("to_openvino", _in_openvino, fault)
    if fault.kind in CUSTOM_KERNELS:
        return _in_custom_operator(fault)
    return _in_code(fault) if fault.place == CODE else _in_inductor(fault)


class NearConstant(nn.Module):
    """A batch norm whose running variance is near zero, after a convolution that is exact in
    float32: to fold it rounds away what it amplifies.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 4, 1)
        self.norm = nn.BatchNorm2d(8)
        weight = self.conv.weight.detach()
        weight.copy_((weight.abs() * 64).round() / 64)
        self.norm.running_var = torch.full((8,), 1e-9)
        self.norm.running_mean = self.conv(pixels()).mean((0, 2, 3)).detach()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.relu(self.norm(self.conv(x))))
        return result


def pixels(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 128 + torch.randint(0, 4, (2, 3, 12, 12), generator=generator).float() / 4


def near_constant() -> nn.Module:
    return NearConstant().eval()


CUSTOM = Architecture("custom", Custom, {"x": random_inputs(4, 16)}, {})


@cache
def _subject(name: str) -> tuple[Subject, Reference]:
    architecture = {**ARCHITECTURES, CUSTOM.name: CUSTOM}[name]
    subject = subject_of(architecture.model(), architecture.inputs, architecture.dims)
    return subject, run_reference(subject)


def explanation_of(fault: Fault) -> Explanation:
    """Plant a fault, and explain the drift."""
    subject, reference = _subject(fault.model)
    target = target_of(subject, fault.recipe, torch.get_num_threads())
    with torchscript_deprecations_silenced(), planted(fault):
        call = reference.singles[0]
        return explain_recipe(
            subject,
            fault.recipe,
            target,
            call,
            limit_s=600,
        )


def _of_graphs(place: str, kind: str, *nodes: str) -> list[Fault]:
    parts = [node.partition(".") for node in nodes]
    return [Fault(model, node, kind, place=place) for model, _, node in parts]


def _of_engine(recipe: str, model: str, *pairs: tuple[str, str]) -> list[Fault]:
    return [Fault(model, node, kind, recipe) for node, kind in pairs]


FAULTS: Sequence[Fault] = [
    *_of_graphs(
        POST_GRAD,
        "reduced precision",
        "tabular.linear_1",
        "convolutional.mean",
        "attentive.linear_3",
        "attentive.layer_norm",
        "recurrent.linear_2",
        "detecting.sigmoid",
        "segmenting.conv2d_1",
        "ranking.sum_1",
        "listening.tanh",
    ),
    *_of_graphs(
        FREEZING,
        "wrong constant",
        "tabular.linear",
        "convolutional.batch_norm_1",
        "attentive.embedding",
        "attentive.linear_4",
        "recurrent.linear_1",
        "detecting.conv2d_1",
        "segmenting.conv2d",
        "ranking.embedding",
        "listening.linear",
    ),
    *_of_graphs(
        DECOMPOSITION,
        "wrong epsilon",
        "tabular.layer_norm",
        "convolutional.batch_norm",
        "attentive.layer_norm_1",
        "segmenting.group_norm",
        "listening.group_norm",
    ),
    *_of_graphs(
        DECOMPOSITION,
        "swapped inputs",
        "recurrent.cat_2",
        "recurrent.cat_1",
        "detecting.softmax",
        "segmenting.cat",
        "tabular.layer_norm",
    ),
    *_of_graphs(
        FREEZING,
        "wrong kernel",
        "tabular.gelu",
        "convolutional.relu",
        "attentive.gelu",
        "recurrent.sigmoid_1",
        "recurrent.tanh",
        "segmenting.elu",
        "listening.tanh",
    ),
    *_of_graphs(POST_GRAD, "wrong kernel", "detecting.softmax", "convolutional.add"),
    *_of_graphs(DECOMPOSITION, "wrong mask", "attentive.scaled_dot_product_attention"),
    *[Fault("custom", "squash", kind, place=DECOMPOSITION) for kind in CUSTOM_KERNELS],
    Fault("listening", "tanh", "wrong kernel", place=CODE),
    *_of_engine(
        "onnxruntime",
        "attentive",
        ("layer_norm_1", "wrong epsilon LayerNormalization 1"),
        ("linear", "reduced precision Add 1"),
    ),
    *_of_engine("onnxruntime", "tabular", ("linear_1", "wrong constant Gemm 1")),
    *_of_engine("onnxruntime", "recurrent", ("tanh_1", "wrong kernel Tanh 1")),
    *_of_engine("onnxruntime", "segmenting", ("cat", "swapped inputs Concat 0")),
    *_of_engine("onnxruntime", "detecting", ("conv2d_2", "wrong constant Conv 2")),
    *_of_engine("openvino", "convolutional", ("batch_norm", "wrong constant Convolution 0")),
    *_of_engine("openvino", "attentive", ("linear_3", "wrong constant MatMul 3")),
    *_of_engine("openvino", "recurrent", ("cat_2", "swapped inputs Concat 2")),
    *_of_engine("openvino", "listening", ("conv2d", "wrong constant Convolution 0")),
]
