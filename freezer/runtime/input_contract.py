"""The input contract of a frozen model: bind the inputs of a call, check them, and pass them to a
payload.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from freezer.errors import ContractError
from freezer.runtime.input_binding import InputBinding
from freezer.runtime.pytree import leaves_of
from freezer.spec import InputSpec, TensorSpec, put_together


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
        self._binding = InputBinding(spec)
        self.names = self._binding.names
        self._checks = tuple((item, getattr(torch, item.dtype)) for item in spec.tensors)

    def tensors_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Tensor], dict[str, int]]:
        """The input tensors of a call as a payload may read them, and the sizes of the named dims.

        Raises:
            ContractError: an input is missing, unknown, or does not meet the spec.
        """
        return self._check(self._binding.bind(args, kwargs))

    def call_native(self, run: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
        """Call a payload like the source model, with the checked tensors of `tensors_of`."""
        leaves = {
            item.name: tensor for (item, _), tensor in zip(self._checks, tensors, strict=True)
        }
        if self._binding.nested is None:
            values = {**self._binding.constants, **leaves}
        else:
            values = {item.name: put_together(item, leaves) for item in self._spec.inputs}
        if self._spec.style == "positional":
            return leaves_of(run(*(values[name] for name in self.names)))
        return leaves_of(run(**{name: values[name] for name in self.names}))

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
            if tensor.shape != item.shape and not self._binding.fits(item, tensor.shape, point):
                raise ContractError(self._binding.shape_problem(item, tensor.shape, point))
            # A lazy conjugate or negative shares memory with its source; a payload reads the
            # memory.
            if tensor.is_neg() or tensor.is_conj():
                tensor = tensor.resolve_conj().resolve_neg()
            tensors.append(tensor if tensor.is_contiguous() else tensor.contiguous())
        self._binding.check_constants(values, Tensor)
        return tensors, point


def _tensor_problem(item: TensorSpec, given: object, device: torch.device) -> str:
    if not isinstance(given, Tensor):
        got = "nothing" if given is None else type(given).__name__
        return (
            f"input {item.name!r}: got {got}, expected a tensor of {item.dtype} {list(item.shape)}"
        )
    if given.dtype is not getattr(torch, item.dtype):
        got = str(given.dtype).removeprefix("torch.")
        return (
            f"input {item.name!r}: got dtype {got}, expected {item.dtype}; convert it with"
            f" .to(torch.{item.dtype})"
        )
    if given.device != device:
        move = (
            ".cpu()"
            if device.type == "cpu"
            else f".to({str(device)!r}), or load the model for {given.device}"
        )
        return (
            f"input {item.name!r}: got device {given.device}, expected {device}; move it with"
            f" {move}"
        )
    return (
        f"input {item.name!r}: got layout {given.layout}, expected a dense tensor; use .to_dense()"
    )
