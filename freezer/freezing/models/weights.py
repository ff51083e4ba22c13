"""The state of a model: weights, with their digest and memory; and plain values in attributes, which `state_dict` omits."""

from __future__ import annotations

import hashlib
import math
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from freezer.numerics import same_tensors
from freezer.runtime.tensors import address_of, addresses_of, bytes_of, dense_parts, memory_of, program_tensors, tensors_bytes

LARGE_BYTES = 500_000_000
"""A model above this size that only a build needs is discarded while it is built."""

_OWN = frozenset((*vars(nn.Module()), "training"))
"""Attributes that every module has."""


def weights_digest(model: nn.Module) -> str:
    """`sha256:` over names, dtypes, shapes and bytes of all parameters, buffers and packed weights, ordered by name."""
    digest = hashlib.sha256()
    tensors = {**dict(model.named_buffers()), **model.state_dict()}  # state_dict omits non-persistent buffers
    for name, value in sorted(tensors.items()):
        for tensor in dense_parts(value):
            digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
            if tensor.numel():
                data = bytes_of(tensor)
                digest.update(memory_of(data))
    return f"sha256:{digest.hexdigest()}"


def is_large(module: nn.Module) -> bool:
    """Whether a module's parameters and buffers take more than LARGE_BYTES."""
    return tensors_bytes(program_tensors(module)) > LARGE_BYTES


def give_back(tensors: Iterable[Tensor], in_use: Iterable[Tensor] = ()) -> int:
    """Free the memory of tensors; return the number of bytes.

    The tensors must never be read again, even if others still refer to them. Memory that cannot be resized (a mapped file, or
    shared with NumPy) is only dereferenced. Memory shared with a tensor of `in_use` is kept.
    """
    kept = addresses_of(in_use)
    freed: dict[int, int] = {}
    for tensor in tensors:
        address = address_of(tensor)
        if address is None or address in kept:
            continue
        storage = tensor.untyped_storage()
        freed[address] = storage.nbytes()
        if storage.resizable():
            storage.resize_(0)
        else:
            tensor.data = tensor.data.new_empty(0)
    return sum(freed.values())


def let_go(error: BaseException, handled: BaseException | None = None) -> None:
    """Clear the frames of an error and of its causes, whose local variables keep graphs and weights alive. It prints as before.

    Args:
        error: an error whose functions have ended.
        handled: an error that was already being handled before; it is left alone.
    """
    waiting: list[BaseException | None] = [error]
    seen = {id(handled)}
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        waiting += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's own tensors by path, not copied: those of `state_dict`, and the buffers that it omits."""
    held = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return {**dict(model.named_buffers()), **held}


def attributes_of(model: nn.Module) -> dict[str, Any]:
    """Copies of the plain values in attributes, by path: None, numbers, texts, tensors, and tuples, lists, sets and dicts of them.

    Parameters, buffers and other objects are omitted. For a ScriptModule, the attributes that `forward` reads or sets.
    """
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return {path: _copied(value) for path, value in _attributes(model) if _is_plain(value) and id(value) not in known}


def same_values(one: Any, other: Any) -> bool:
    """Whether two plain values are equal; tensors in shape, dtype and every element, NaN included."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_tensors(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same_values(value, other[key]) for key, value in one.items())
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(same_values(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    scripted: set[str] = set()
    for path, module in model.named_modules():
        if any(path.startswith(above) for above in scripted):
            continue
        prefix = f"{path}." if path else ""
        if isinstance(module, torch.jit.ScriptModule):
            scripted.add(prefix)
            yield from ((f"{prefix}{name}", value) for name, value in _of_script(module))
        else:
            yield from ((f"{prefix}{name}", value) for name, value in vars(module).items() if name not in _OWN)


def _of_script(module: torch.jit.ScriptModule) -> Iterator[tuple[str, Any]]:
    """The attributes that the graph of `forward` reads or sets: TorchScript lists none."""
    if not module._c._has_method("forward"):
        return
    graph: Any = module.inlined_graph  # keep a reference: its nodes die with it
    paths = {_path(node) for kind in ("prim::GetAttr", "prim::SetAttr") for node in graph.findAllNodes(kind)}
    for path in sorted(path for path in paths if path):
        value: Any = module
        for name in path.split("."):
            value = getattr(value, name, None)
        yield path, value


def _path(node: Any) -> str:
    """The dotted path of the attribute that a node reads or sets; empty if it does not start at the module itself."""
    names = [node.s("name")]
    owner = next(node.inputs()).node()
    while owner.kind() == "prim::GetAttr":
        names.insert(0, owner.s("name"))
        owner = next(owner.inputs()).node()
    return ".".join(names) if owner.kind() == "prim::Param" else ""


def _is_plain(value: Any, depth: int = 8) -> bool:
    if isinstance(value, Mapping | tuple | list | set | frozenset):
        inner = value.values() if isinstance(value, Mapping) else value
        return depth > 0 and all(_is_plain(item, depth - 1) for item in inner)  # the limit ends values that contain themselves
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | Tensor)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_copied(item) for item in value]
    return set(value) if isinstance(value, set | frozenset) else value
