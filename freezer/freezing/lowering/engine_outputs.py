"""Outputs of engines that return contiguous arrays only: the order of dims in memory that eager's
have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def output_orders(program: torch.export.ExportedProgram) -> list[list[int] | None]:
    """For each output the order of its dims in memory, largest stride first; None if it is
    contiguous.

    Expanded outputs count as contiguous, and so do those whose sizes depend on values, of which
    there is no example.
    """
    found: list[list[int] | None] = []
    for value in values_named(program, program.graph_signature.user_outputs):
        strides = [_in_example(stride) for stride in value.stride()]
        single = [
            dim for dim, size in enumerate(value.shape) if isinstance(size, int) and size == 1
        ]  # whose strides are arbitrary
        others = [dim for dim in range(value.dim()) if dim not in single]
        if None not in strides and 0 not in strides:
            others.sort(key=lambda dim: (-strides[dim], dim))
        found.append(None if others == sorted(others) else [*single, *others])
    return found


def _in_example(size: Any) -> Any:
    """A size in the example that a program was exported with; None if it depends on values."""
    return size if isinstance(size, int) else size.node.hint


def values_named(program: torch.export.ExportedProgram, names: Sequence[Any]) -> list[Any]:
    """The fake tensors of a program's inputs or outputs."""
    nodes = {node.name: node for node in program.graph.nodes}
    return [nodes[name].meta["val"] for name in names]
