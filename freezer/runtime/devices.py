"""Move tensors, and calls of functions, between the CPU and a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from freezer.runtime.pytree import flatten, unflatten

CPU = torch.device("cpu")

DEPTH = 3
"""Nesting of lists, tuples and dicts within which tensors in attributes are found."""


def tensors_on(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Move tensors to a device, with their strides."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def called_on(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Wrap a function on a device, so that it takes and returns tensors on the CPU."""
    if device.type == "cpu":
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        structure, leaves = flatten(function(*moved_to_device(list(args), device, DEPTH), **moved_to_device(kwargs, device, DEPTH)))
        return unflatten(structure, [leaf.cpu() for leaf in leaves])

    return call


def moved_to_device(value: Any, device: torch.device, depth: int) -> Any:
    """The value with its tensors on a device; the value itself if all of them are there already."""
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device)
    if not depth or type(value) not in (list, tuple, dict):
        return value
    items = list(value.values()) if isinstance(value, dict) else list(value)
    moved = [moved_to_device(item, device, depth - 1) for item in items]
    if all(one is other for one, other in zip(moved, items, strict=True)):
        return value
    return dict(zip(value, moved, strict=True)) if isinstance(value, dict) else type(value)(moved)
