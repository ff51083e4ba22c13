"""Report what Inductor made of a captured program: kernels, calls of operators, constants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from freezer.artifact import Change
from freezer.runtime.tensors import address_of, tensors_bytes

KERNEL = "kernel of Inductor"
"""Operator kind of Inductor's own kernels."""


@dataclass
class Observed:
    """What a build shows while Inductor runs.

    Attributes:
        ops: number of calls by kind: Inductor's kernels, and operators of oneDNN, MKL or torch.
        fused: number of operations by name that are fused into these operators.
        num_loops: Inductor's loops before they are fused into kernels.
        folded_bytes: size of the frozen graph's new constants, without packed ones.
        packed_bytes: size of each packed weight.
        code: code of the wrapper and the kernels.
        graph: text of the final graph.
    """

    ops: Counter[str] = field(default_factory=Counter)
    fused: Counter[str] = field(default_factory=Counter)
    num_loops: int = 0
    folded_bytes: int = 0
    packed_bytes: tuple[int, ...] = ()
    code: str = ""
    graph: str = ""

    def see_constants(self, constants: Collection[Tensor], known: Collection[int]) -> None:
        """Measure the constants of the frozen graph.

        Args:
            constants: all of them.
            known: memory addresses of the captured program's tensors.
        """
        packed = [tensor for tensor in constants if tensor.is_mkldnn]
        plain = [tensor for tensor in constants if not tensor.is_mkldnn]
        self.folded_bytes = tensors_bytes(t for t in plain if address_of(t) not in known)
        self.packed_bytes = tuple(map(torch.ops.mkldnn._nbytes, packed))

    def see_code(self, graph: Any, wrapper: str, kernels: str) -> None:
        """Count what Inductor's GraphLowering was compiled to."""
        self.code = wrapper + (f"\n\n// kernels\n\n{kernels}" if kernels else "")
        for scheduled in graph.scheduler.nodes:
            parts = scheduled.get_nodes()
            calls = [part.node for part in parts if part.is_extern()]
            self.num_loops += len(parts) - len(calls)
            self.ops[KERNEL] += len(calls) < len(parts)
            for node in calls:
                if type(node).__name__ != "MultiOutput":
                    self._see_call(node)

    def _see_call(self, node: Any) -> None:
        kind = getattr(node, "op_overload", None) or getattr(node, "python_kernel_name", None)
        self.ops[str(kind or type(node).__name__)] += 1
        for argument in getattr(node, "constant_args", ()):
            if isinstance(argument, str) and argument not in ("none", ""):
                self.fused[argument] += 1

    def changes(self) -> list[Change]:
        """What was packed and fused."""
        fused = ", ".join(f"{count} {name}" for name, count in sorted(self.fused.items()))
        num_packed, num_fused = len(self.packed_bytes), self.fused.total()
        changes = []
        if num_packed:
            note = f"{sum(self.packed_bytes)} bytes"
            changes.append(Change(name="weights packed", count=num_packed, note=note))
        if num_fused:
            name = "operations fused into convolutions and linear layers"
            changes.append(Change(name=name, count=num_fused, note=fused))
        if self.num_loops > self.ops[KERNEL]:
            note = f"in {self.ops[KERNEL]} kernels"
            changes.append(Change(name="loops fused into kernels", count=self.num_loops, note=note))
        return changes
