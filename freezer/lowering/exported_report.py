"""What there is to tell of an exported program that is stored as it was captured: a Report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import torch

from freezer.report import Kept, Report, stored_as_captured
from freezer.source_lines import line_of_stack


def report_stored(program: torch.export.ExportedProgram, mutates: Collection[str], *, prefix: str = "") -> Report:
    """The same operators before and after; the buffers that calls change, with the line that does.

    Args:
        program: of torch.export.
        mutates: names of the buffers that a call changes.
        prefix: of names in the program that the source model has without it.
    """
    ops = dict(fx_operators(program.graph_module))
    return Report(
        ops_before=ops,
        ops_after=ops,
        kept=tuple(Kept(name=name.removeprefix(prefix), reason=f"`forward` changes it{_where(program, name)}") for name in mutates),
        notes=(stored_as_captured(len(program.state_dict)),),
    )


def fx_operators(module: torch.fx.GraphModule) -> Counter[str]:
    """The number of operators by kind in a graph of torch.fx, and in those that it holds for branches and loops."""
    return Counter(str(node.target) for node in _nodes(module) if node.op == "call_function" and "getitem" not in str(node.target))


def _nodes(module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            yield from part.graph.nodes


def _where(program: torch.export.ExportedProgram, buffer: str) -> str:
    """` at` and the line of the first node that writes into a buffer itself; nothing where it is a view that is written."""
    inputs = program.graph_signature.inputs_to_buffers
    for node in program.graph.nodes:
        if node.op == "placeholder" and inputs.get(node.name) == buffer:
            for user in node.users:
                line = line_of_stack(user.meta.get("stack_trace")) if _writes_into(user, node) else None
                if line:
                    return f" at {line}"
    return ""


def _writes_into(node: torch.fx.Node, given: torch.fx.Node) -> bool:
    schema: Any = getattr(node.target, "_schema", None)
    return schema is not None and any(
        value is given and argument.alias_info is not None and argument.alias_info.is_write
        for argument, value in zip(schema.arguments, node.args, strict=False)
    )
