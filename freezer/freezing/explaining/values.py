"""Values of every node of a graph: the reference in float64, eager's, and a candidate's; the errors
of a candidate at each node; and the nodes of lowered graphs, matched by their provenance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import starmap
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Interpreter, Node

from freezer.artifact.explanation import MOST, NO_ERROR, WRONG, Error, NodeScore
from freezer.compare import distances, judge_rmse
from freezer.freezing.capture import copy_of
from freezer.freezing.diagnostics import line_of_stack
from freezer.freezing.drift import Widening, own_dtype, widening
from freezer.freezing.lowering import forget_origins, origin_of
from freezer.runtime.tensors import comparable, dtype_name, in_double, tensors_in, values_of

ROUNDING = 3.0
"""Error ratio that other orders of the same operations may have: the default of the drift gate."""

NodeValues = Mapping[str, Tensor]
"""Tensors by the name of their node in the source graph."""

Run = tuple[list[Tensor], dict[str, Tensor]]
"""Outputs of a run, and values by node."""


class _Recorder(Interpreter):
    """Runs a graph, and records the tensors of its operators.

    Attributes:
        values: copies of the tensors that operators returned, by node.
    """

    def __init__(self, graph: GraphModule, replaced: NodeValues) -> None:
        super().__init__(graph)
        self.values: dict[str, Tensor] = {}
        self._replaced = replaced

    def run_node(self, n: Node) -> Any:
        """Run a node; a replaced one passes the given value on, in its own dtype and layout."""
        value = super().run_node(n)
        if n.op in ("placeholder", "get_attr", "output") or not isinstance(value, Tensor):
            return value
        if value.layout is not torch.strided:
            return value
        self.values[n.name] = value.detach().clone()
        given = self._replaced.get(n.name)
        if given is None or given.shape != value.shape:
            return value
        return torch.empty_like(value).copy_(given)


def run_graph(
    graph: GraphModule,
    inputs: Sequence[Tensor],
    replaced: NodeValues | None = None,
) -> Run:
    """Run a graph in Python.

    Args:
        graph: takes the inputs in order.
        inputs: its inputs, which are copied.
        replaced: values that nodes pass on instead of their own.

    Returns:
        Its output tensors, and the tensor of every operator by node.
    """
    recorder = _Recorder(graph, replaced or {})
    with torch.no_grad():
        outputs = recorder.run(*(tensor.clone() for tensor in inputs))
    return [value.detach().clone() for value in tensors_in(outputs)], recorder.values


class GraphReference:
    """An exported program for one input set, with the reference and eager's value of every node.

    Attributes:
        graph: the program as a graph with its weights.
        inputs, signature_inputs: the input tensors in order, and their names in the program.
        exact, eager: value of every operator in float64, and in eager's precision.
        exact_outputs, eager_outputs: outputs of both.
    """

    def __init__(self, program: ExportedProgram, inputs: Sequence[Tensor]) -> None:
        forget_origins(program.graph)
        self.graph = graph = graph_of(program)
        self.inputs = list(inputs)
        self.signature_inputs = list(map(str, program.graph_signature.user_inputs))
        self._mode = Widening(own_dtype(graph, [tensor.dtype for tensor in inputs]))
        wide = copy_of(graph).double()
        assert isinstance(wide, GraphModule)
        self._wide = wide
        self._mode.widen_attributes(wide)
        self.eager_outputs, self.eager = run_graph(graph, inputs)
        self.exact_outputs, self.exact = self._in_double({})

    def _in_double(self, replaced: NodeValues) -> Run:
        """Outputs in float64, and what each operator gives for these values of its operands."""
        wide = [in_double(each) if comparable(each) else each for each in self.inputs]
        with widening(self._mode):
            return run_graph(self._wide, wide, replaced)

    def scores(
        self,
        accumulated: NodeValues,
        local: NodeValues | None = None,
    ) -> tuple[NodeScore, ...]:
        """The errors of a candidate at each node that it has.

        Args:
            accumulated: a candidate's values in its own stream, from the same inputs.
            local: its operators' results for the reference's values of their operands. By default
                each value is compared with what the operator gives in float64 for the candidate's
                own operands, which needs no further run of the candidate.

        Returns:
            The scores in the order of the graph.
        """
        after = self._in_double(accumulated)[1] if local is None else {}
        scores = []
        for node in self.graph.graph.nodes:
            value = accumulated.get(node.name)
            if value is None or node.name not in self.eager:
                continue
            exact, eager = self.exact[node.name], self.eager[node.name]
            alone = value if local is None else local.get(node.name, value)
            total = error_of(exact, eager, value)
            scores.append(score(node, error_of(exact, eager, alone, after.get(node.name)), total))
        return tuple(scores)

    def effects(self, values: NodeValues) -> dict[str, float]:
        """What the local error of each value alone adds to the outputs: the largest relative error
        of one.

        Args:
            values: a candidate's values. What it does to operators that have none is part of the
                error of those after them.
        """
        _, after = self._in_double(values)
        found = {}
        for name, value in values.items():
            moved = self.exact[name] + in_double(value) - after[name]
            outputs, _ = run_graph(self.graph, self.inputs, {name: moved})
            found[name] = max(error.relative for error in self._errors(outputs))
        return found

    def fails(self, outputs: Sequence[Tensor]) -> bool:
        """Whether outputs are further from the reference than eager's by more than rounding."""
        return any(error.excess > 1 for error in self._errors(outputs))

    def _errors(self, outputs: Sequence[Tensor]) -> list[Error]:
        answers = zip(self.exact_outputs, self.eager_outputs, outputs, strict=True)
        return list(starmap(error_of, answers))


def graph_of(program: ExportedProgram) -> GraphModule:
    """A program as a graph with its weights."""
    graph = program.module(check_guards=False)
    assert isinstance(graph, GraphModule)
    return graph


def score(node: Node, local: Error, accumulated: Error) -> NodeScore:
    """The score of a node of the exported program."""
    return NodeScore(
        node=node.name,
        operator=str(node.target),
        module=module_of(node),
        line=line_of_stack(node.stack_trace),
        local=local,
        accumulated=accumulated,
    )


def module_of(node: Node) -> str:
    """Path of the module that calls a node's operator, in the source model."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.removeprefix("model.") if path != "model" else ""


def error_of(
    exact: Tensor,
    eager: Tensor,
    value: Tensor,
    target: Tensor | None = None,
    *,
    limit: float = ROUNDING,
) -> Error:
    """The error of a candidate's tensor.

    Args:
        exact, eager: the reference's and eager's value.
        value: the candidate's.
        target: what it should be instead of `exact`; eager's error counts all the same.
        limit: largest error ratio that passes.
    """
    expected = exact if target is None else target
    if value.shape != eager.shape or expected.shape != eager.shape:
        return WRONG
    if not comparable(eager):
        return NO_ERROR if torch.equal(value.to(eager.dtype), eager) else WRONG
    if not torch.equal(value.isfinite(), eager.isfinite()):
        return WRONG
    [native] = distances(values_of(in_double(exact)), values_of(in_double(eager)))
    [sums] = distances(values_of(in_double(expected)), values_of(in_double(value)))
    error = sums.error(dtype_name(eager.dtype), eager.numel())
    error = replace(error, native_rmse=native.rmse)
    ratio, bound = judge_rmse(error, limit)
    return Error(
        relative=_quotient(sums.rmse, sums.rms),
        ratio=min(ratio, MOST),
        excess=_quotient(sums.rmse, bound),
    )


def _quotient(error: float, unit: float) -> float:
    if error == 0:
        return 0.0
    return min(error / unit, MOST) if unit > 0 else MOST


def matches(source: Graph, lowered: Graph) -> dict[str, str]:
    """The node of a lowered graph that computes the result of a source node, by source node.

    Of several nodes that were made from one, it is the last with the result's shape. Where a node
    vanished into the one before, which nothing else used, that one computes its result: a batch
    norm folded into a convolution.
    """
    of_source = {}
    kept = set()
    shapes = {node.name: _shape(node) for node in source.nodes}
    for node in lowered.nodes:
        origin = origin_of(node)
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if origin is None or origin not in shapes:
            continue
        kept.add(origin)
        if _shape(node) == shapes[origin]:
            of_source[origin] = node
    found = {}
    for node in source.nodes:
        if node.name in of_source:
            found[absorbed(node, kept).name] = of_source[node.name].name
    return found


def absorbed(node: Node, kept: set[str]) -> Node:
    """The last of the nodes that vanished into a node: each the only user of the one before, with
    the same shape, and not among those kept.
    """
    while len(node.users) == 1:
        [user] = node.users
        if user.op == "output" or user.name in kept or _shape(user) != _shape(node):
            break
        node = user
    return node


def _shape(node: Node) -> tuple[int, ...] | None:
    """Sizes of a node's result as the graph has them; None if it is not a tensor."""
    shape = getattr(node.meta.get("val"), "shape", None)
    return None if shape is None else tuple(map(_size, shape))


def _size(size: Any) -> int:
    return size if isinstance(size, int) else size.node.hint
