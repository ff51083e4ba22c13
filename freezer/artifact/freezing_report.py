"""What freezing did to one payload's graph, in counts that were taken from the graphs themselves. Pure data; imports no torch.

The JSON form is part of the manifest, under `freezing.reports` by payload and under `freezing.candidates` for those that lost.
Operators are named as torch names them in that kind of graph: `aten::linear` in TorchScript, `aten.linear.default` in a graph of
torch.export. Constants, reads of attributes, and what only puts values together or takes them apart (tuples, lists, `getitem`) are
no operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

T = TypeVar("T")

MAX_LISTED = 100
"""Names, reasons and sentences that a list of the manifest's form holds; one more says how many are left out."""


NOT_TRIED = "not tried"
"""How the outcome of a way begins that is not for this kind of model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Something that freezing did, by name, and how often."""

    name: str
    count: int
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTensor:
    """A parameter or buffer that did not become a constant, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PreservedName:
    """An attribute or method that can still be read, set or called, and why: asked for, or changed by `forward` at a line."""

    name: str
    kind: Literal["attribute", "method"]
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FreezingReport:
    """What freezing did to one payload's graph.

    Attributes:
        ops_before, ops_after: number of operators by kind, in the captured graph and in the one that the payload runs.
        changes: what was folded, fused, merged and removed. Only what happened is there.
        changes_at_load: what the loader's own optimization, which cannot be saved, does to the graph on the machine that built it.
        num_constants, constants_bytes: parameters and buffers that became constants, and their size in the captured graph; tied
            ones are counted once.
        constants: their names, as the source model has them; of tied ones each name.
        folded_bytes: of new constants that folding computed.
        kept: parameters and buffers that did not become constants.
        unused: parameters and buffers that no call reads, and that the payload does not hold.
        preserved: attributes and methods that stay.
        size_before_bytes: of the captured graph's parameters and buffers.
        size_after_bytes: of the payload.
        phases_s: wall time of each phase of the build, in seconds.
        memory_peak_bytes: the most resident memory that the build needed above what the process held before; None where the system
            does not tell.
        guards: what the capture found that inputs must hold to, in words.
        instructions: number of the payload's instructions by family, of families that not every CPU of the architecture has.
        instructions_of: the device class that they were held to; empty where the payload holds no machine code.
        notes: what else is worth knowing, one sentence each.
    """

    ops_before: Mapping[str, int] = field(default_factory=dict)
    ops_after: Mapping[str, int] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    changes_at_load: tuple[Change, ...] = ()
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

    def shortened(self, max_listed: int = MAX_LISTED) -> FreezingReport:
        """The same report; longer lists of names, reasons and sentences are cut, and their last item counts the rest."""

        def cut(items: tuple[T, ...], rest: Callable[[int], T]) -> tuple[T, ...]:
            hidden = len(items) - max_listed
            return (*items[:max_listed], rest(hidden)) if hidden > 0 else items

        return replace(
            self,
            constants=cut(self.constants, "and {} more".format),
            unused=cut(self.unused, "and {} more".format),
            guards=cut(self.guards, "and {} more".format),
            notes=cut(self.notes, "and {} more".format),
            kept=cut(self.kept, lambda count: KeptTensor(name=f"and {count} more", reason="not listed")),
            preserved=cut(
                self.preserved, lambda count: PreservedName(name=f"and {count} more", kind="attribute", why="not listed")
            ),
        )


def stored_as_captured(num_tensors: int) -> str:
    """The note of a payload that holds the captured program itself."""
    return (
        "The payload is the captured program: nothing is folded, fused or made a constant, and its "
        f"{num_tensors} parameters and buffers stay what they are."
    )
