"""Copies of a source model to run, capture and time, on its own or on another device; the source model stays as it is."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from freezer.runtime.devices import CPU, DEPTH, moved_to_device
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def copied(model: nn.Module) -> nn.Module:
    """Deep-copy a model without torch.compile's wrappers and backward hooks, which serving never calls.

    Also copies tensors that copy.deepcopy refuses: those that a hook computes (torch.nn.utils.weight_norm), and sparse tensors in
    a compressed layout. Scripted functions are shared. Buffers that overlap in memory overlap in the copy too.
    """
    with torch.no_grad():  # otherwise the parameters of a copied ScriptModule are not leaves, and .double() warns
        memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in _refused(model)}
        held = [vars(module) for module in _plain_modules(model)]
        memo |= {id(function): function for function in _scripted_functions(held)}
        whole: nn.Module = _unwrapped(copy.deepcopy(model, memo))
    for module in _plain_modules(whole):
        for name, part in module._modules.items():
            module._modules[name] = _unwrapped(part)
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    return whole


def device_of_model(model: nn.Module, inputs: Iterable[Tensor] = ()) -> torch.device:
    """The device of a model's first parameter or buffer; without any, of its first input; otherwise the CPU."""
    first = next((tensor for tensor in (*model.parameters(), *model.buffers(), *inputs)), None)
    return CPU if first is None else first.device


def model_on(model: nn.Module, device: torch.device) -> nn.Module:
    """Copy a model to a device.

    Also moves what `Module.to` does not: tensors in attributes and in lists, tuples and dicts there, constants of a TorchScript
    graph, and the device named in an exported program's graph. A device named in TorchScript code stays.
    """
    with torch.no_grad(), torchscript_deprecations_silenced():
        if isinstance(model, torch.jit.ScriptModule):
            file = io.BytesIO()  # reading it again also moves the constants of its graph
            torch.jit.save(model, file)
            file.seek(0)
            return cast(nn.Module, torch.jit.load(file, map_location=device))
        moved = copied(model).to(device)
        for part in _plain_modules(moved):
            _move_attributes(part, device)
            if isinstance(part, fx.GraphModule):
                _rename_devices(part, device)
        return moved


def _move_attributes(module: nn.Module, device: torch.device) -> None:
    for name, value in list(vars(module).items()):
        if name not in ("_parameters", "_buffers", "_modules"):
            vars(module)[name] = moved_to_device(value, device, DEPTH)


def _rename_devices(module: fx.GraphModule, device: torch.device) -> None:
    """Make a graph of torch.export create its tensors on a device."""
    for node in module.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": device}
        if node.target is torch.ops.aten.to.device:
            node.args = (node.args[0], device, *node.args[2:])
    module.recompile()


def _refused(model: nn.Module) -> list[Tensor]:
    """The tensors of a model that copy.deepcopy refuses."""
    held = [value for module in _plain_modules(model) for value in (*vars(module).values(), *module._buffers.values())]
    return [item for item in held if isinstance(item, Tensor) and (not item.is_leaf or item.layout in _COMPRESSED)]


def _scripted_functions(value: Any, depth: int = 3) -> Iterator[Any]:
    """The scripted functions in attributes, and in lists, tuples and dicts there."""
    if isinstance(value, torch.jit.ScriptFunction):
        yield value
    elif depth and isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _scripted_functions(item, depth - 1)


def _plain_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]


def _unwrapped(module: Any) -> Any:
    """The module inside torch.compile's wrappers."""
    while type(module).__name__ == "OptimizedModule" and isinstance(getattr(module, "_orig_mod", None), nn.Module):
        module = module._orig_mod
    return module
