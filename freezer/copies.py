"""A copy of a source model to run, capture and time; the source model itself stays as it is."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def copied(model: nn.Module) -> nn.Module:
    """A deep copy of a model, as it is served: without torch.compile's wrappers and backward hooks, which serving never calls.

    Tensors that copy.deepcopy refuses are copied all the same: those that a hook computes (torch.nn.utils.weight_norm), and sparse
    ones in a compressed layout. Scripted functions, which nothing changes and nothing copies, are shared. Of a storage that no
    other buffer uses, only what its buffer shows is copied.
    """
    with torch.no_grad():  # else a copied ScriptModule's parameters are no leaves, and .double() warns of them
        memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in (*_refused(model), *_wasteful(model))}
        memo |= {id(function): function for function in _functions([vars(module) for module in _plain_modules(model)])}
        whole: nn.Module = _unwrapped(copy.deepcopy(model, memo))
    for module in whole.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its parts are scripted too, and have no such hooks
        for name, part in module._modules.items():
            module._modules[name] = _unwrapped(part)
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    return whole


def _refused(model: nn.Module) -> list[Tensor]:
    """The tensors of a model that copy.deepcopy refuses."""
    held = [value for module in _plain_modules(model) for value in (*vars(module).values(), *module._buffers.values())]
    return [item for item in held if isinstance(item, Tensor) and (not item.is_leaf or item.layout in _COMPRESSED)]


def _wasteful(model: nn.Module) -> list[Tensor]:
    """Buffers that are views of a larger storage, which no other of them uses. Parameters are cut by copy.deepcopy."""
    buffers = (buffer for module in _plain_modules(model) for buffer in module._buffers.values())
    held = {id(buffer): buffer for buffer in buffers if type(buffer) is Tensor and buffer.layout is torch.strided}
    used = Counter(buffer.untyped_storage().data_ptr() for buffer in held.values())
    return [
        buffer
        for buffer in held.values()
        if buffer.untyped_storage().nbytes() > buffer.numel() * buffer.element_size()
        and used[buffer.untyped_storage().data_ptr()] == 1
    ]


def _functions(value: Any, depth: int = 3) -> Iterator[Any]:
    """The scripted functions in attributes, and in lists, tuples and dicts of them."""
    if isinstance(value, torch.jit.ScriptFunction):
        yield value
    elif depth and isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _functions(item, depth - 1)


def _plain_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]


def _unwrapped(module: Any) -> Any:
    """The module that torch.compile was given, of what it gave."""
    while type(module).__name__ == "OptimizedModule" and isinstance(getattr(module, "_orig_mod", None), nn.Module):
        module = module._orig_mod
    return module
