"""Bind the inputs of a call to the leaves of a spec, and check their sizes. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from freezer.errors import ContractError
from freezer.spec import InputItem, InputSpec, NestedSpec, TensorSpec, take_apart


class InputBinding:
    """The part of an input contract that is the same for tensors and arrays.

    Attributes:
        names: of the inputs, in order.
        constants: baked-in constants by path.
        nested: all items by path; None where every input is a leaf, which is faster.
    """

    def __init__(self, spec: InputSpec) -> None:
        self.names = tuple(item.name for item in spec.inputs)
        self.constants = spec.constants
        self._dims = {dim.name: dim for dim in spec.dims}
        nested = any(isinstance(item, NestedSpec) for item in spec.inputs)
        self.nested = {item.name: item for item in spec.items} if nested else None

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The leaves of a call by path; their values are not checked.

        Raises:
            ContractError: an input is unknown or given twice, or a structure differs.
        """
        if len(args) > len(self.names):
            raise ContractError(
                f"got {len(args)} positional inputs, expected at most {len(self.names)}:"
                f" {', '.join(self.names)}"
            )
        return (
            self._bind_leaves(args, kwargs)
            if self.nested is None
            else self._bind_nested(args, kwargs, self.nested)
        )

    def check_constants(self, values: Mapping[str, Any], leaf: type) -> None:
        """Check that what remains of a call's inputs is the baked-in constants.

        Raises:
            ContractError: a constant has another value, or is a tensor or array (`leaf`).
        """
        for name, value in values.items():
            if isinstance(value, leaf) or value != self.constants[name]:
                got = "a tensor" if isinstance(value, leaf) else repr(value)
                raise ContractError(
                    f"input {name!r}: got {got}, but {self.constants[name]!r} was baked in when the"
                    " model was frozen"
                )

    def fits(self, item: TensorSpec, shape: Sequence[int], point: dict[str, int]) -> bool:
        """Whether every size is the declared one, or within its dim's bounds and the same as in
        earlier inputs.

        Args:
            item: the tensor's spec.
            shape: its shape in this call.
            point: sizes of the dims in earlier inputs; those of this one are added.
        """
        if len(shape) != len(item.shape):
            return False
        for size, expected in zip(shape, item.shape, strict=True):
            if isinstance(expected, int):
                if size != expected:
                    return False
            elif point.setdefault(expected, size) != size or size not in self._dims[expected].sizes:
                return False
        return True

    def shape_problem(
        self, item: TensorSpec, shape: Sequence[int], point: Mapping[str, int]
    ) -> str:
        """The message for a shape that does not fit."""
        bounds = ", ".join(str(dim) for dim in self._dims.values())
        expected = f"{list(item.shape)} with {bounds}" if bounds else f"{list(item.shape)}"
        so_far = f", {dict(point)} in the inputs before it" if point else ""
        return f"input {item.name!r}: got shape {list(shape)}, expected {expected}{so_far}"

    def _bind_leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(zip(self.names, args, strict=False))
        for name, value in kwargs.items():
            if name in values or name not in self.names:
                problem = "is given twice" if name in values else "is unknown"
                raise ContractError(f"input {name!r} {problem}; expected {', '.join(self.names)}")
            values[name] = value
        return values

    def _bind_nested(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], items: Mapping[str, InputItem]
    ) -> dict[str, Any]:
        """Leaves by path, from whole inputs and from parts given by path."""
        values: dict[str, Any] = {}
        for name, value in (*zip(self.names, args, strict=False), *kwargs.items()):
            if name not in items:
                raise ContractError(
                    f"input {name!r} is unknown; expected {', '.join(self.names)}, or their parts"
                    " by path"
                )
            for path, leaf in take_apart(items[name], value):
                if path in values:
                    raise ContractError(
                        f"input {path!r} is given twice; expected it within {name!r}, or by its"
                        " path"
                    )
                values[path] = leaf
        return values
