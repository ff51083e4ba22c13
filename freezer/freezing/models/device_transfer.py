"""Models and tensors on another device. A model is always copied: what was given stays where it is, as it is."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, fx, nn

from freezer.freezing.models.cloning import copied
from freezer.runtime.devices import CPU, DEPTH, moved_to_device
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced


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
        moved = moved_to_device(value, device, DEPTH)
        if moved is not value:
            vars(module)[name] = moved


def _rename_devices(module: fx.GraphModule, device: torch.device) -> None:
    """Let a graph of torch.export make its tensors on a device, where it names another."""
    for node in module.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": device}
        if node.target is torch.ops.aten.to.device:
            node.args = (node.args[0], device, *node.args[2:])
    module.recompile()
