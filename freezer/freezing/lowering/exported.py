"""Store an ExportedProgram as it was captured; it runs wherever torch runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from freezer.artifact.sections import FreezingReport, KeptTensor, stored_as_captured
from freezer.errors import BuildError
from freezer.freezing.capture.program import Captured
from freezer.freezing.diagnostics.source_lines import line_of_stack
from freezer.freezing.lowering.result import Lowered
from freezer.freezing.target.target import Target
from freezer.runtime.payloads import on_first

SUFFIX = ".pt2"


def build(captured: Captured, path: Path, target: Target, settings: Mapping[str, Any]) -> Lowered:
    """Write a .pt2 file that torch.export.load reads.

    Raises:
        BuildError: the program cannot be serialized.
    """
    try:
        torch.export.save(on_first(captured.program, target.device), str(path))
    except Exception as error:
        raise BuildError(f"torch.export.save: {type(error).__name__}: {error}") from error
    prefix = "model." if captured.convention == "flat" else ""
    return Lowered(report=report_stored(captured.program, captured.mutates, prefix=prefix))


def report_stored(program: torch.export.ExportedProgram, mutates: Collection[str], *, prefix: str = "") -> FreezingReport:
    """Report a program stored as captured: its operators, and the buffers that calls change, with the line that does.

    Args:
        program: the exported program.
        mutates: names of the buffers that a call changes.
        prefix: prefix of names in the program, which the source model's names lack.
    """
    ops = dict(fx_operators(program.graph_module))
    return FreezingReport(
        ops_before=ops,
        ops_after=ops,
        kept=tuple(
            KeptTensor(name=name.removeprefix(prefix), reason=f"`forward` changes it{_where(program, name)}") for name in mutates
        ),
        notes=(stored_as_captured(len(program.state_dict)),),
    )


def fx_operators(module: torch.fx.GraphModule) -> Counter[str]:
    """Number of operators by kind in a graph of torch.fx and in its branches and loops."""
    graphs = (part.graph for part in module.modules() if isinstance(part, torch.fx.GraphModule))
    names = (str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function")
    return Counter(name for name in names if "getitem" not in name)


def _where(program: torch.export.ExportedProgram, buffer: str) -> str:
    """` at` and the source line of the first node that writes into a buffer; empty if only a view of it is written."""
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
