"""Flatten a model's result to tensors; rebuilding.py does the reverse."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from freezer.errors import CaptureError
from freezer.spec import OutputSpec, OutputStructure


def flatten(result: Any) -> tuple[OutputStructure, list[Tensor]]:
    """Structure of a result, and its tensors in order.

    Raises:
        CaptureError: a part is not a tensor, a plain constant, or a tuple, list, dict, dataclass or
            ModelOutput of those.
    """
    leaves: list[Tensor] = []
    return _flatten(result, leaves, "output"), leaves


def leaves_of(result: Any) -> list[Tensor]:
    """The tensors of a result, in order; faster for the common ones than `flatten`."""
    if isinstance(result, Tensor):
        return [result]
    if type(result) in (tuple, list) and all(isinstance(item, Tensor) for item in result):
        return list(result)
    return flatten(result)[1]


def _flatten(value: Any, leaves: list[Tensor], path: str) -> OutputStructure:
    if isinstance(value, Tensor):
        leaves.append(value)
        return OutputStructure(kind="tensor")
    if value is None or isinstance(value, bool | int | float | str):
        return OutputStructure(kind="constant", value=value)
    fields = _named_fields(value, path)
    if fields is not None:
        kind = (
            "dict" if type(value) is dict else "namedtuple" if isinstance(value, tuple) else "named"
        )
        items = tuple(_flatten(item, leaves, f"{path}.{key}") for key, item in fields.items())
        type_name = "" if kind == "dict" else f"{type(value).__module__}.{type(value).__qualname__}"
        return OutputStructure(kind=kind, keys=tuple(fields), items=items, type_name=type_name)  # type: ignore[arg-type]
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        items = tuple(_flatten(item, leaves, f"{path}.{i}") for i, item in enumerate(value))
        return OutputStructure(kind=kind, items=items)  # type: ignore[arg-type]
    raise CaptureError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}; expected tensors,"
        " constants, or tuples, lists, dicts and dataclasses of them: return those from forward"
    )


def _named_fields(value: Any, path: str) -> dict[str, Any] | None:
    """The fields of a dict, ModelOutput, dataclass or named tuple, in order; None for anything
    else.
    """
    if isinstance(value, Mapping):
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            raise CaptureError(
                f"{path} has the key {odd[0]!r} of type {type(odd[0]).__name__}; expected str keys"
            )
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    return None


def output_specs(structure: OutputStructure, leaves: Sequence[Tensor]) -> tuple[OutputSpec, ...]:
    """Names, dtypes and ranks of the tensors of a result."""
    names = list(_names(structure, ""))
    return tuple(
        OutputSpec(name=name, dtype=str(leaf.dtype).removeprefix("torch."), rank=leaf.dim())
        for name, leaf in zip(names, leaves, strict=True)
    )


def _names(structure: OutputStructure, prefix: str) -> Iterator[str]:
    if structure.kind == "tensor":
        yield prefix or "output"
    elif structure.kind != "constant":
        keys = structure.keys or tuple(str(index) for index in range(len(structure.items)))
        for key, item in zip(keys, structure.items, strict=True):
            yield from _names(item, f"{prefix}.{key}" if prefix else key)
