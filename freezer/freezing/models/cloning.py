"""A copy of a source model to run, capture and time; the source model itself stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from freezer.runtime.tensor_memory import address_of

_T = TypeVar("_T")
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def copied(model: nn.Module) -> nn.Module:
    """A deep copy of a model, as it is served: without torch.compile's wrappers and backward hooks, which serving never calls.

    Tensors that copy.deepcopy refuses are copied all the same: those that a hook computes (torch.nn.utils.weight_norm), and sparse
    ones in a compressed layout. Scripted functions, which nothing changes and nothing copies, are shared. Of a larger storage, only
    what a buffer shows is copied, where it lies apart from all other tensors; what lies over one another still does in the copy.
    """
    with torch.no_grad():  # else a copied ScriptModule's parameters are no leaves, and .double() warns of them
        pairs = _overlaps(model)
        memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in (*_refused(model), *_wasteful(model, pairs))}
        held = [vars(module) for module in _plain_modules(model)]
        memo |= {id(function): function for function in _all_of(torch.jit.ScriptFunction, held)}
        for parameter in _overlaid(pairs):  # torch copies each parameter apart
            memo[id(parameter)] = nn.Parameter(copy.deepcopy(parameter.data, memo), parameter.requires_grad)
        whole: nn.Module = _unwrapped(copy.deepcopy(model, memo))
    for module in whole.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its parts are scripted too, and have no such hooks
        for name, part in module._modules.items():
            module._modules[name] = _unwrapped(part)
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    return whole


def overlapping(model: nn.Module) -> list[Tensor]:
    """The tensors of a model that lie over another one in memory: what is written into one of them changes the other."""
    return list({id(tensor): tensor for pair in _overlaps(model) for tensor in pair}.values())


def _refused(model: nn.Module) -> list[Tensor]:
    """The tensors of a model that copy.deepcopy refuses."""
    held = [value for module in _plain_modules(model) for value in (*vars(module).values(), *module._buffers.values())]
    return [item for item in held if isinstance(item, Tensor) and (not item.is_leaf or item.layout in _COMPRESSED)]


def _wasteful(model: nn.Module, pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Buffers that are views of a larger storage, and lie apart from all other tensors. Parameters are cut by copy.deepcopy."""
    buffers = (buffer for module in _plain_modules(model) for buffer in module._buffers.values())
    held = {id(buffer): buffer for buffer in buffers if type(buffer) is Tensor and buffer.layout is torch.strided}
    shared = {id(tensor) for pair in pairs for tensor in pair}
    return [
        buffer
        for buffer in held.values()
        if buffer.untyped_storage().nbytes() > buffer.numel() * buffer.element_size() and id(buffer) not in shared
    ]


def _overlaid(pairs: list[tuple[Tensor, Tensor]]) -> list[nn.Parameter]:
    """Of tensors that lie over one another, the parameters that lie over one which is none."""
    mixed = [pair for pair in pairs if not all(isinstance(tensor, nn.Parameter) for tensor in pair)]
    return list({id(tensor): tensor for pair in mixed for tensor in pair if type(tensor) is nn.Parameter}.values())


def _overlaps(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Pairs of tensors that lie over one another."""
    placed = sorted(((*span, tensor) for tensor in _held(model) if (span := _span(tensor))), key=lambda item: item[:2])
    pairs: list[tuple[Tensor, Tensor]] = []
    reaching: list[tuple[int, Tensor]] = []
    for start, end, tensor in placed:
        reaching = [(until, other) for until, other in reaching if until > start]
        pairs += [(other, tensor) for _, other in reaching]
        reaching.append((end, tensor))
    return pairs


def _held(model: nn.Module) -> list[Tensor]:
    """Every tensor that a model holds, each once: parameters, buffers, and those in attributes and in lists, tuples and dicts."""
    plain = (tensor for module in _plain_modules(model) for tensor in _all_of(Tensor, vars(module)))
    return list({id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *plain)}.values())


def _span(tensor: Tensor) -> tuple[int, int] | None:
    """Where a tensor lies in memory, from its first byte to behind its last; None where it is nowhere, or that cannot be told."""
    if is_lazy(tensor) or tensor.layout is not torch.strided or tensor.is_nested or tensor.numel() == 0:
        return None
    address = address_of(tensor)
    if address is None:
        return None
    first = address + int(tensor.storage_offset()) * tensor.element_size()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (reach + 1) * tensor.element_size()


def _all_of(kind: type[_T], value: Any, depth: int = 3) -> Iterator[_T]:
    """What is of a type in attributes, and in lists, tuples and dicts of them."""
    if isinstance(value, kind):
        yield value
    elif depth and isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _all_of(kind, item, depth - 1)


def _plain_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]


def _unwrapped(module: Any) -> Any:
    """The module that torch.compile was given, of what it gave."""
    while type(module).__name__ == "OptimizedModule" and isinstance(getattr(module, "_orig_mod", None), nn.Module):
        module = module._orig_mod
    return module
