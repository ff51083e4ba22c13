"""What freezing did to one payload's graph, in counts that were taken from the graphs themselves. Pure data; imports no torch.

The JSON form is part of the manifest, under `freezing.reports` by payload and under `freezing.candidates` for those that lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Something that freezing did, by name, and how often."""

    name: str
    count: int
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A parameter or buffer that did not become a constant, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Preserved:
    """An attribute or method that can still be read, set or called, and why: asked for, or changed by `forward` at a line."""

    name: str
    kind: Literal["attribute", "method"]
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What freezing did to one payload's graph.

    Attributes:
        ops_before, ops_after: number of operators by kind, in the captured graph and in the one that the payload runs.
        changes: what was folded, fused, merged and removed. Only what happened is there.
        num_constants, constants_bytes: parameters and buffers that became constants, and their size in the captured graph.
        folded_bytes: of new constants that folding computed.
        kept: parameters and buffers that did not become constants.
        preserved: attributes and methods that stay.
        size_before_bytes: of the captured graph's parameters and buffers.
        size_after_bytes: of the payload.
        phases_s: wall time of each phase of the build, in seconds.
        memory_peak_bytes: the most resident memory that the build needed above what the process held before; None where the system
            does not tell.
        guards: what the capture found that inputs must hold to, in words.
        notes: what else is worth knowing, one sentence each.
    """

    ops_before: Mapping[str, int] = field(default_factory=dict)
    ops_after: Mapping[str, int] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    num_constants: int = 0
    constants_bytes: int = 0
    folded_bytes: int = 0
    kept: tuple[Kept, ...] = ()
    preserved: tuple[Preserved, ...] = ()
    size_before_bytes: int = 0
    size_after_bytes: int = 0
    phases_s: Mapping[str, float] = field(default_factory=dict)
    memory_peak_bytes: int | None = None
    guards: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The manifest's form of the report."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        """The report that `to_json` wrote, also after a pass through JSON text."""
        return cls(
            **{
                **data,
                "changes": tuple(Change(**item) for item in data["changes"]),
                "kept": tuple(Kept(**item) for item in data["kept"]),
                "preserved": tuple(Preserved(**item) for item in data["preserved"]),
                "guards": tuple(data["guards"]),
                "notes": tuple(data["notes"]),
            }
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowered:
    """What a lowering says of the payload that it wrote.

    Attributes:
        report: without sizes, phases of the capture, and memory, which the build adds.
        texts: by file name, readable forms of the frozen model: `code.txt`, `graph.txt`.
    """

    report: Report = field(default_factory=Report)
    texts: Mapping[str, str] = field(default_factory=dict)
