"""Rebuild a model's result from its output tensors, of torch or numpy. Imports no torch."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from freezer.spec import OutputStructure


class NamedOutput(dict[str, Any]):
    """Result in place of the source's dataclass or ModelOutput: access by key, attribute and
    position.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the output has no {name!r}; it has {', '.join(self)}") from None

    def __getitem__(self, key: str | int) -> Any:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


def unflatten(structure: OutputStructure, leaves: Sequence[Any]) -> Any:
    """Rebuild the result from its leaves in order; a named structure becomes a NamedOutput."""
    return _unflatten(structure, iter(leaves))


def rebuilder(structure: OutputStructure) -> Callable[[Sequence[Any]], Any]:
    """A function like `unflatten` for one structure, faster for the common ones."""
    if structure.kind == "tensor":
        return lambda leaves: leaves[0]
    if all(item.kind == "tensor" for item in structure.items):
        if structure.kind == "tuple":
            return tuple
        if structure.kind == "named":
            return lambda leaves: NamedOutput(zip(structure.keys, leaves, strict=True))
    return lambda leaves: unflatten(structure, leaves)


def _unflatten(structure: OutputStructure, leaves: Iterator[Any]) -> Any:
    if structure.kind == "tensor":
        return next(leaves)
    if structure.kind == "constant":
        return structure.value
    items = [_unflatten(item, leaves) for item in structure.items]
    if structure.kind == "tuple":
        return tuple(items)
    if structure.kind == "list":
        return items
    if structure.kind == "namedtuple":
        return _named_tuple(structure.type_name.rpartition(".")[2], structure.keys)(*items)
    named = zip(structure.keys, items, strict=True)
    return dict(named) if structure.kind == "dict" else NamedOutput(named)


@functools.cache
def _named_tuple(name: str, keys: tuple[str, ...]) -> Callable[..., tuple[Any, ...]]:
    return namedtuple(name, keys)
