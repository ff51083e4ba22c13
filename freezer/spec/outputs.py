"""Output contracts: tensors, and the structure that holds them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSpec:
    """One output tensor, named by its path in the model's result (`logits`, `0`, `hidden.1`; `output` for a lone tensor)."""

    name: str
    dtype: str
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputStructure:
    """How the flat output tensors are put together again.

    Attributes:
        kind: `tensor` (a leaf), `constant` (a leaf that is no tensor), `tuple`, `list`, `dict`, `namedtuple`, or `named` (a
            dataclass or ModelOutput: attributes, keys and order are kept, the type is not).
        keys: of a dict or a named structure.
        items: the parts, in order.
        value: of a constant.
        type_name: of a named structure, for people.
    """

    kind: Literal["tensor", "constant", "tuple", "list", "dict", "named", "namedtuple"]
    keys: tuple[str, ...] = ()
    items: tuple[OutputStructure, ...] = ()
    value: bool | int | float | str | None = None
    type_name: str = field(default="")

    def to_json(self) -> dict[str, Any]:
        """The manifest's form of the structure."""
        data: dict[str, Any] = {"kind": self.kind}
        if self.kind in ("dict", "named", "namedtuple"):
            data["keys"] = list(self.keys)
        if self.kind not in ("tensor", "constant"):
            data["items"] = [item.to_json() for item in self.items]
        if self.kind == "constant":
            data["value"] = self.value
        if self.type_name:
            data["type_name"] = self.type_name
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OutputStructure:
        """The structure that `to_json` wrote."""
        return cls(
            kind=data["kind"],
            keys=tuple(data.get("keys", ())),
            items=tuple(cls.from_json(item) for item in data.get("items", ())),
            value=data.get("value"),
            type_name=data.get("type_name", ""),
        )
