"""The input contract of a frozen model: bind the inputs of a call, check them, and pass them to a payload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from freezer.errors import ContractError
from freezer.runtime.pytree import leaves_of
from freezer.spec.inputs import InputSpec
from freezer.spec.items import InputItem, NestedSpec, TensorSpec, put_together, take_apart


class InputContract:
    """Checks inputs against a spec.

    Args:
        spec: of the model.
        device: that tensors must be on.
    """

    def __init__(self, spec: InputSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._on_cpu = device.type == "cpu"
        self.names = tuple(item.name for item in spec.inputs)
        self._checks = tuple((item, getattr(torch, item.dtype)) for item in spec.tensors)
        self._constants = spec.constants
        self._dims = {dim.name: dim for dim in spec.dims}
        nested = any(isinstance(item, NestedSpec) for item in spec.inputs)
        self._items = {item.name: item for item in spec.items} if nested else None
        """All items by path; None where every input is a leaf, which is faster."""

    def tensors_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], dict[str, int]]:
        """The input tensors of a call as a payload may read them, and the sizes of the named dims.

        Raises:
            ContractError: an input is missing, unknown, or does not meet the spec.
        """
        if len(args) > len(self.names):
            raise ContractError(f"got {len(args)} positional inputs, expected at most {len(self.names)}: {', '.join(self.names)}")
        return self._check(self._bind(args, kwargs) if self._items is None else self._bind_nested(args, kwargs, self._items))

    def call_native(self, run: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
        """Call a payload like the source model, with the checked tensors of `tensors_of`."""
        leaves = {item.name: tensor for (item, _), tensor in zip(self._checks, tensors, strict=True)}
        if self._items is None:
            values = {**self._constants, **leaves}
        else:
            values = {item.name: put_together(item, leaves) for item in self._spec.inputs}
        if self._spec.style == "positional":
            return leaves_of(run(*(values[name] for name in self.names)))
        return leaves_of(run(**{name: values[name] for name in self.names}))

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        values = dict(zip(self.names, args, strict=False))
        for name, value in kwargs.items():
            if name in values or name not in self.names:
                problem = "is given twice" if name in values else "is unknown"
                raise ContractError(f"input {name!r} {problem}; expected {', '.join(self.names)}")
            values[name] = value
        return values

    def _bind_nested(self, args: tuple[Any, ...], kwargs: dict[str, Any], items: Mapping[str, InputItem]) -> dict[str, Any]:
        """Leaves by path, from whole inputs and from parts given by path."""
        values: dict[str, Any] = {}
        for name, value in (*zip(self.names, args, strict=False), *kwargs.items()):
            if name not in items:
                raise ContractError(f"input {name!r} is unknown; expected {', '.join(self.names)}, or their parts by path")
            for path, leaf in take_apart(items[name], value):
                if path in values:
                    raise ContractError(f"input {path!r} is given twice; expected it within {name!r}, or by its path")
                values[path] = leaf
        return values

    def _check(self, values: dict[str, Any]) -> tuple[list[Tensor], dict[str, int]]:
        """Runs for every call: messages are built in other functions."""
        tensors: list[Tensor] = []
        point: dict[str, int] = {}
        for item, dtype in self._checks:
            tensor = values.pop(item.name, None)
            if (
                not isinstance(tensor, Tensor)
                or tensor.dtype is not dtype
                or not (tensor.is_cpu if self._on_cpu else tensor.device == self._device)
                or tensor.layout is not torch.strided
            ):
                raise ContractError(_tensor_problem(item, tensor, self._device))
            if tensor.shape != item.shape and not self._fits(item, tensor, point):
                raise ContractError(self._shape_problem(item, tensor, point))
            # A lazy conjugate or negative shares memory with its source; a payload reads the memory.
            if tensor.is_neg() or tensor.is_conj():
                tensor = tensor.resolve_conj().resolve_neg()
            tensors.append(tensor if tensor.is_contiguous() else tensor.contiguous())
        for name, value in values.items():
            if isinstance(value, Tensor) or value != self._constants[name]:
                got = "a tensor" if isinstance(value, Tensor) else repr(value)
                raise ContractError(
                    f"input {name!r}: got {got}, but {self._constants[name]!r} was baked in when the model was frozen"
                )
        return tensors, point

    def _fits(self, item: TensorSpec, tensor: Tensor, point: dict[str, int]) -> bool:
        """Whether every size is the declared one, or within its dim's bounds and the same as in earlier inputs."""
        if tensor.dim() != len(item.shape):
            return False
        for size, expected in zip(tensor.shape, item.shape, strict=True):
            if isinstance(expected, int):
                if size != expected:
                    return False
            elif point.setdefault(expected, size) != size or size not in self._dims[expected].sizes:
                return False
        return True

    def _shape_problem(self, item: TensorSpec, tensor: Tensor, point: Mapping[str, int]) -> str:
        bounds = ", ".join(str(dim) for dim in self._dims.values())
        expected = f"{list(item.shape)} with {bounds}" if bounds else f"{list(item.shape)}"
        so_far = f", {dict(point)} in the inputs before it" if point else ""
        return f"input {item.name!r}: got shape {list(tensor.shape)}, expected {expected}{so_far}"


def _tensor_problem(item: TensorSpec, given: object, device: torch.device) -> str:
    if not isinstance(given, Tensor):
        got = "nothing" if given is None else type(given).__name__
        return f"input {item.name!r}: got {got}, expected a tensor of {item.dtype} {list(item.shape)}"
    if given.dtype is not getattr(torch, item.dtype):
        got = str(given.dtype).removeprefix("torch.")
        return f"input {item.name!r}: got dtype {got}, expected {item.dtype}; convert it with .to(torch.{item.dtype})"
    if given.device != device:
        move = ".cpu()" if device.type == "cpu" else f".to({str(device)!r}), or load the model for {given.device}"
        return f"input {item.name!r}: got device {given.device}, expected {device}; move it with {move}"
    return f"input {item.name!r}: got layout {given.layout}, expected a dense tensor; use .to_dense()"
