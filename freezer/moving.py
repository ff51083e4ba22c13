"""Models and tensors on another device. A model is always copied: what was given stays where it is, as it is."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from freezer.copies import copied
from freezer.legacy import torchscript_deprecations_silenced
from freezer.outputs import flatten, unflatten

CPU = torch.device("cpu")

_DEPTH = 3
"""Of lists, tuples and dicts in attributes, that are looked into for tensors."""


def tensors_on(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The tensors on a device, with their strides; those that are there already themselves."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def called_on(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A function of tensors on a device, as one of tensors on the CPU: what it takes is put there, what it gives brought back."""
    if device.type == "cpu":
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        structure, leaves = flatten(function(*_moved(list(args), device, _DEPTH), **_moved(kwargs, device, _DEPTH)))
        return unflatten(structure, [leaf.cpu() for leaf in leaves])

    return call


def device_of_model(model: nn.Module, inputs: Iterable[Tensor] = ()) -> torch.device:
    """Where a model's parameters and buffers lie; of a model without any, where its inputs do; without those, the CPU.

    Of one that is spread over devices: where the first lies.
    """
    first = next((tensor for tensor in (*model.parameters(), *model.buffers(), *inputs)), None)
    return CPU if first is None else first.device


def model_on(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a model on a device, as it would be had it been made there.

    Parameters and buffers are moved, and what `Module.to` leaves where it is: tensors in attributes and in lists, tuples and dicts
    of them, constants of a TorchScript graph, and the device that an exported program's graph names. A device that TorchScript
    names stays: nothing but making the graph anew changes it.
    """
    with torch.no_grad(), torchscript_deprecations_silenced():
        if isinstance(model, torch.jit.ScriptModule):
            return _script_on(model, device)
        moved = copied(model).to(device)
        for part in moved.modules():
            if isinstance(part, torch.jit.ScriptModule):
                continue
            _move_attributes(part, device)
            if isinstance(part, fx.GraphModule):
                _rename_devices(part, device)
        return moved


def _script_on(module: torch.jit.ScriptModule, device: torch.device) -> nn.Module:
    """A TorchScript module read anew on a device: constants of its graph, which `Module.to` does not see, are put there too."""
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return cast(nn.Module, torch.jit.load(file, map_location=device))


def _move_attributes(module: nn.Module, device: torch.device) -> None:
    for name, value in list(vars(module).items()):
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        moved = _moved(value, device, _DEPTH)
        if moved is not value:
            vars(module)[name] = moved


def _moved(value: Any, device: torch.device, depth: int) -> Any:
    """The value with its tensors on a device; itself where it holds none that lies elsewhere."""
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device)
    if not depth or type(value) not in (list, tuple, dict):
        return value
    items = list(value.values()) if isinstance(value, dict) else list(value)
    moved = [_moved(item, device, depth - 1) for item in items]
    if all(one is other for one, other in zip(moved, items, strict=True)):
        return value
    return dict(zip(value, moved, strict=True)) if isinstance(value, dict) else type(value)(moved)


def _rename_devices(module: fx.GraphModule, device: torch.device) -> None:
    """Let a graph of torch.export make its tensors on a device, where it names another."""
    for node in module.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": device}
        if node.target is torch.ops.aten.to.device:
            node.args = (node.args[0], device, *node.args[2:])
    module.recompile()
