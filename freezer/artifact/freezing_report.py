"""What freezing did to the graph of each payload, as a manifest records it. Imports no torch.

Operators have torch's names: `aten::linear` in TorchScript, `aten.linear.default` in torch.export.
Constants, attribute reads, and building or unpacking of tuples and lists do not count as operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

_MAX_LISTED = 100
"""Longest list of names or reasons in a manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A transformation, and how often freezing applied it."""

    name: str
    count: int
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTensor:
    """A parameter or buffer that was not made a constant, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PreservedName:
    """An attribute or method that was kept, and why: requested, or changed by `forward` at
    a line.
    """

    name: str
    kind: Literal["attribute", "method"]
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FreezingReport:
    """What freezing did to one payload's graph.

    Attributes:
        ops_before, ops_after: number of operators by kind, in the captured graph and in the
            payload's.
        changes: what was folded, fused, merged and removed.
        num_constants, constants_bytes: number and captured size of parameters and buffers that
            became constants; tied ones count once.
        constants: their names in the source model, including all names of tied ones.
        folded_bytes: size of new constants computed by folding.
        kept: parameters and buffers that were not made constants.
        unused: parameters and buffers that no call reads; the payload lacks them.
        preserved: attributes and methods that were kept.
        size_before_bytes: of the captured graph's parameters and buffers.
        size_after_bytes: of the payload.
        phases_s: wall time of each phase of the build, in seconds.
        memory_peak_bytes: peak resident memory that the build added; None if the system does not
            report it.
        guards: conditions on inputs that the capture found, in words.
        instructions: number of instructions by family, of families that some CPUs of the
            architecture lack.
        instructions_of: device class that they were checked against; empty without machine code.
        notes: further remarks, one sentence each.
    """

    ops_before: Mapping[str, int] = field(default_factory=dict)
    ops_after: Mapping[str, int] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    num_constants: int = 0
    constants_bytes: int = 0
    constants: tuple[str, ...] = ()
    folded_bytes: int = 0
    kept: tuple[KeptTensor, ...] = ()
    unused: tuple[str, ...] = ()
    preserved: tuple[PreservedName, ...] = ()
    size_before_bytes: int = 0
    size_after_bytes: int = 0
    phases_s: Mapping[str, float] = field(default_factory=dict)
    memory_peak_bytes: int | None = None
    guards: tuple[str, ...] = ()
    instructions: Mapping[str, int] = field(default_factory=dict)
    instructions_of: str = ""
    notes: tuple[str, ...] = ()

    def shortened(self, max_listed: int = _MAX_LISTED) -> FreezingReport:
        """The same report; longer lists of names and reasons are cut, and a note counts them."""
        cut: dict[str, Any] = {}
        long = []
        for name in ("constants", "kept", "unused", "preserved", "guards"):
            items = getattr(self, name)
            cut[name] = items[:max_listed]
            if len(items) > max_listed:
                long.append(f"{len(items)} {name}")
        if not long:
            return self
        note = f"Only the first {max_listed} are listed of {', '.join(long)}."
        return replace(self, **cut, notes=(*self.notes, note))


def stored_as_captured(num_tensors: int) -> str:
    """The note of a payload that is the captured program itself."""
    return (
        "The payload is the captured program: nothing is folded, fused or made a constant, and its "
        f"{num_tensors} parameters and buffers stay what they are."
    )
