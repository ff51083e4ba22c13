"""Captures: make a graph of a model. Every capture works on a fresh copy of the model in its
initial state. READ THIS FIRST.

`export`, `trace` and `convert` capture a flat form of the model: tensors in order in, a tuple of
tensors out, constants baked in, so a payload depends on no class of the source. `as-is` takes a
TorchScript source unchanged; `script` compiles the model's source. Both keep the source's
signature. All but `as-is` are compared with the eager model first (equivalence.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch.fx import Graph, Node

from freezer.errors import CaptureError
from freezer.freezing.capture.equivalence import Original
from freezer.freezing.capture.export import export, strict_may_help
from freezer.freezing.capture.program import Captured
from freezer.freezing.capture.script import as_is, convert, script
from freezer.freezing.capture.trace import SIZES, trace
from freezer.freezing.models import PRESERVE, ExportedModule, Subject
from freezer.freezing.recipes import CaptureName
from freezer.spec import Point, interior_points

Repair = Literal["apart", "float64"]
"""`apart`: do not fold the node into the one before. `float64`: compute it in float64."""

REPAIRS = "node_repairs"
"""Setting of a recipe: the repair of each node by name."""

aten = torch.ops.aten


def repaired(captured: Captured, repairs: Mapping[str, Repair]) -> Captured:
    """The captured program with repaired nodes, which changes the program itself.

    Raises:
        CaptureError: it lacks a node.
    """
    program = captured.program
    nodes = {node.name: node for node in program.graph.nodes}
    for name, repair in repairs.items():
        if name not in nodes:
            raise CaptureError(f"{captured.name}: node {name!r} to repair ({repair}) is missing")
        if repair == "apart":
            _keep_apart(program.graph, nodes[name])
        else:
            _in_float64(program.graph, nodes[name])
    program.graph_module.recompile()
    notes = [f"{name}: {repair}" for name, repair in repairs.items()]
    return replace(captured, notes=(*captured.notes, f"Repaired nodes: {', '.join(notes)}."))


def _keep_apart(graph: Graph, node: Node) -> None:
    """Put an operator before a node that changes no value and that no engine folds through."""
    before = node.args[0]
    assert isinstance(before, Node), "a node that was folded has an operand"
    with graph.inserting_before(node):
        clamped = graph.call_function(aten.clamp.default, (before, -torch.inf))
    clamped.meta = copy.copy(before.meta)
    node.replace_input_with(before, clamped)


def _in_float64(graph: Graph, node: Node) -> None:
    """Convert the operands of a node to float64, and its result back."""
    value = node.meta["val"]
    for operand in node.all_input_nodes:
        wide = operand.meta.get("val")
        if isinstance(wide, torch.Tensor) and wide.dtype is torch.float32:
            with graph.inserting_before(node):
                widened = _converted(graph, operand, torch.float64)
            node.replace_input_with(operand, widened)
    users = list(node.users)
    node.meta = {**node.meta, "val": value.to(torch.float64)}
    with graph.inserting_after(node):
        narrowed = _converted(graph, node, value.dtype)
    for user in users:
        user.replace_input_with(node, narrowed)


def _converted(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    converted = graph.call_function(aten.to.dtype, (node, dtype))
    converted.meta = {**node.meta, "val": node.meta["val"].to(dtype)}
    return converted


NUM_FURTHER_POINTS = 6
"""Points between the bounds at which a capture for all sizes is compared; the judge's input sets
have the first of them.
"""

_CAPTURES: Mapping[CaptureName, Callable[[Original], Captured]] = {
    "as-is": as_is,
    "script": script,
    "trace": trace,
    "trace-sizes": partial(trace, every_size=True),
    "convert": convert,
    "export": export,
    "export-strict": partial(export, strict=True),
}


class Attempt:
    """A subject to capture.

    Args:
        subject: the model.
        point: the only sizes that the graph is for; None for all.
        keeps: whether graphs of a model without state are kept for further recipes, whose lowerings
            may not free their tensors.

    Attributes:
        point: the only sizes that the graph is for; None for all.
        subject: the model, with the input sets that captures are compared on.
        discarded: whether the model's weights were freed, so that nothing more can be captured.
    """

    def __init__(
        self,
        subject: Subject,
        point: Point | None,
        *,
        keeps: bool = False,
    ) -> None:
        self.point = point
        self.discarded = False
        self._keeps = keeps
        self._errors: dict[CaptureName, CaptureError | None] = {}
        """The error of each capture that was tried, or None if it succeeded."""
        self._cache: dict[CaptureName, Captured] = {}
        if point is None:
            points = interior_points(subject.spec, NUM_FURTHER_POINTS)
            known = [each.point for each in subject.sets]
            more = [subject.further_set(each) for each in points if each not in known]
            sets = [*subject.sets, *more]
        else:
            sets = [each for each in subject.sets if each.point == point]
        self.subject = replace(subject, sets=sets)
        self._original = Original(subject=self.subject, point=point)

    def unfit(self, name: CaptureName) -> str | None:
        """Why a capture cannot take such a model, in a few words; None if it is worth a try."""
        model = self.subject.model
        scripted = self.subject.scripted
        if self.discarded:
            return "the model was discarded after it was captured"
        if scripted != (name in ("as-is", "convert")):
            return f"the source is {'' if scripted else 'not '}TorchScript"
        if name == "trace" and isinstance(model, ExportedModule):
            return "the source is an exported program, which a trace would fix to one size"
        if name == "script" and isinstance(model, torch.fx.GraphModule):
            return "the source is a graph, which torch.jit.script does not take"
        if name == "export-strict" and "export" in self._errors:
            error = self._errors["export"]
            if error is None or not strict_may_help(error):
                return "strict tracing would end as torch.export did"
        traced = self._errors.get("trace")
        if name == "trace-sizes" and (traced is None or traced.code != SIZES):
            return "no trace was refused for the sizes that Python reads"
        return None

    def capture(self, name: CaptureName) -> Captured:
        """Make the graph of one capture.

        Raises:
            CaptureError: the capture cannot take the model, or the graph differs from the model.
        """
        if name in self._cache:
            return self._cache[name]
        earlier = self._errors.get(name)
        if self._keeps and earlier is not None:
            raise CaptureError(str(earlier), code=earlier.code)
        if self.subject.kept_names and name not in ("as-is", "script"):
            names = ", ".join(map(repr, self.subject.kept_names))
            raise CaptureError(
                f"one function, as {name} makes it, keeps no attribute or method, and {names} must"
                " stay; preserve needs torch.jit.script or a TorchScript source",
                code=PRESERVE,
            )
        try:
            captured = _CAPTURES[name](self._original)
        except CaptureError as error:
            self._errors[name] = error
            raise
        self._errors[name] = None
        if self._keeps and name != "as-is" and not self._original.eager.stateful:
            captured = replace(captured, owned=())
            self._cache[name] = captured
        return captured
