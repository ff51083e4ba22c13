"""Output contract of a model: tensors, and the structure that contains them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from freezer.codec import written_if
from freezer.spec.items import PlainValue

_LEAVES = ("tensor", "constant")
_WITH_KEYS = ("dict", "named", "namedtuple")


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSpec:
    """One output tensor, named by its path in the result: `logits`, `0`, `hidden.1`; `output` for a single tensor."""

    name: str
    dtype: str
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputStructure:
    """How to rebuild the result from the flat output tensors.

    Attributes:
        kind: `tensor` (a leaf), `constant` (another leaf), `tuple`, `list`, `dict`, `namedtuple`, or `named` (a
            dataclass or ModelOutput, whose attributes, keys and order are kept, but not its type).
        keys: of a dict or a named structure.
        items: the parts, in order.
        value: of a constant.
        type_name: of a named structure, for people.
    """

    kind: Literal["tensor", "constant", "tuple", "list", "dict", "named", "namedtuple"]
    keys: tuple[str, ...] = field(default=(), metadata=written_if(lambda self: self.kind in _WITH_KEYS))
    items: tuple[OutputStructure, ...] = field(default=(), metadata=written_if(lambda self: self.kind not in _LEAVES))
    value: PlainValue = field(default=None, metadata=written_if(lambda self: self.kind == "constant"))
    type_name: str = field(default="", metadata=written_if(lambda self: self.type_name != ""))
