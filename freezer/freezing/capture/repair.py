"""Change single nodes of an exported program, where freezing them as they are drifts."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch.fx import Graph, Node

from freezer.errors import CaptureError
from freezer.freezing.capture.program import Captured

Repair = Literal["apart", "float64"]
"""`apart`: do not fold the node into the one before. `float64`: compute it in float64."""

REPAIRS = "node_repairs"
"""Setting of a recipe: the repair of each node by name."""

aten = torch.ops.aten


def repaired(captured: Captured, repairs: Mapping[str, Repair]) -> Captured:
    """The captured program with repaired nodes, which changes the program itself.

    Raises:
        CaptureError: it is not an exported program, or lacks a node.
    """
    program = captured.program
    nodes = {}
    if isinstance(program, torch.export.ExportedProgram):
        nodes = {node.name: node for node in program.graph.nodes}
    for name, repair in repairs.items():
        if name not in nodes or repair not in get_args(Repair):
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
