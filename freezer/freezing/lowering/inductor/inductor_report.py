"""Report what Inductor made of a captured program: kernels, calls of operators, constants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from freezer.artifact import Change, FreezingReport
from freezer.freezing.capture import Captured
from freezer.freezing.lowering.operators import fx_operators
from freezer.runtime.tensors import address_of, identity_of, tensors_bytes

KERNEL = "kernel of Inductor"
"""Operator kind of Inductor's own kernels."""


def report_before(captured: Captured) -> FreezingReport:
    """The operators and weights of a captured program.

    Compiling may free the weights, so they are counted before.
    """
    program = captured.program
    names = [*program.graph_signature.parameters, *program.graph_signature.buffers]
    tensors = [
        program.state_dict[name] if name in program.state_dict else program.constants[name]
        for name in names
    ]
    return FreezingReport(
        ops_before=fx_operators(program.graph_module),
        num_constants=len(set(map(identity_of, tensors))),
        constants_bytes=tensors_bytes(tensors),
        constants=tuple(map(captured.source_name, names)),
    )


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
        self.folded_bytes = tensors_bytes(
            t for t in constants if not t.is_mkldnn and address_of(t) not in known
        )
        self.packed_bytes = tuple(
            torch.ops.mkldnn._nbytes(tensor) for tensor in constants if tensor.is_mkldnn
        )

    def see_code(self, graph: Any, wrapper: str, kernels: str) -> None:
        """Count what Inductor's GraphLowering was compiled to."""
        self.code = wrapper + (f"\n\n// kernels\n\n{kernels}" if kernels else "")
        for scheduled in graph.scheduler.nodes:
            parts = scheduled.get_nodes()
            loops = [part for part in parts if not part.is_extern()]
            self.num_loops += len(loops)
            self.ops[KERNEL] += bool(loops)
            for node in (part.node for part in parts if part.is_extern()):
                if type(node).__name__ != "MultiOutput":
                    kind = (
                        getattr(node, "op_overload", None)
                        or getattr(node, "python_kernel_name", None)
                        or type(node).__name__
                    )
                    self.ops[str(kind)] += 1
                    texts = (
                        item for item in getattr(node, "constant_args", ()) if isinstance(item, str)
                    )
                    self.fused.update(text for text in texts if text not in ("none", ""))

    def changes(self) -> Iterator[Change]:
        """What was packed and fused."""
        if self.packed_bytes:
            yield Change(
                name="weights packed",
                count=len(self.packed_bytes),
                note=f"{sum(self.packed_bytes)} bytes",
            )
        if self.fused:
            note = _listed(self.fused)
            yield Change(
                name="operations fused into convolutions and linear layers",
                count=self.fused.total(),
                note=note,
            )
        if self.num_loops > self.ops[KERNEL]:
            yield Change(
                name="loops fused into kernels",
                count=self.num_loops,
                note=f"in {self.ops[KERNEL]} kernels",
            )


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
