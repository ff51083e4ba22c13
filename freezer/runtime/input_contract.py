"""Check the inputs of a call against the input spec, and name what is wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from freezer.spec.items import TensorSpec


def wrong_tensor(item: TensorSpec, given: object, device: torch.device) -> str:
    """What is wrong with an input that is no dense tensor of the declared dtype on the device."""
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
