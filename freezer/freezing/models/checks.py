"""Checks of a source model before anything is made from it: weights, mode, names to keep, and
parameters. And its weights: their digest, their size, and giving their memory back.
"""

from __future__ import annotations

import hashlib
import inspect
import traceback
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit._script import RecursiveScriptModule
from torch.nn.parameter import is_lazy

from freezer.errors import SourceError, SpecError
from freezer.freezing.models.calls import copied
from freezer.runtime.tensors import (
    address_of,
    addresses_of,
    bytes_of,
    dense_parts,
    named_tensors,
    program_tensors,
    tensors_bytes,
)
from freezer.spec import InputSpec

PRESERVE, RESET = "CP-PRESERVE", "CP-RESET"


def check_weights(name: str, model: nn.Module) -> None:
    """Check that every parameter and buffer has values.

    Raises:
        SourceError: one is on the meta device, or of a lazy layer that was never called; code
            CP-WEIGHTS-MISSING.
    """
    for path, tensor in named_tensors(model):
        if is_lazy(tensor) or tensor.is_meta:
            raise SourceError(
                f"{name}: {path} has no values: it is on the meta device, or of lazy layers, which"
                " get their weights from the first call; load the weights"
                " (model.to_empty(device='cpu'), then load_state_dict), or call the model once"
                " before freezing it",
                code="CP-WEIGHTS-MISSING",
            )


def check_mode(model: nn.Module) -> None:
    """Check that a model and all its parts are in eval mode. Parts that its own `train` keeps in
    training mode are accepted.

    Raises:
        SpecError: the model or a part is in training mode.
    """
    training = _training(model)
    if training:
        training -= _training(copied(model).eval())
    if training:
        part = min(training) or "the model"
        raise SpecError(f"{part} is in training mode; call model.eval() before freezing it")


def _training(model: nn.Module) -> set[str]:
    # a frozen ScriptModule has no mode
    return {name for name, part in model.named_modules() if getattr(part, "training", False)}


def check_kept_names(
    name: str,
    model: nn.Module,
    preserve: Sequence[str],
    reset: str | None,
) -> None:
    """Check the names to preserve, and the reset method.

    Args:
        name: name of the entry.
        model: the source model.
        preserve: attributes, methods and attributes of submodules (`sub.attr`).
        reset: a method of the model that takes no arguments.

    Raises:
        SpecError: a name does not exist, or no frozen model can keep it (code CP-PRESERVE); `reset`
            is not such a method (code CP-RESET).
    """
    for path in preserve:
        problem = _problem(model, path)
        if problem:
            raise SpecError(f"{name}: preserve: {problem}", code=PRESERVE)
    if reset is not None:
        problem = _problem(model, reset)
        if problem or not callable(getattr(model, reset)):
            problem = problem or f"{reset!r} is not a method"
            raise SpecError(f"{name}: reset: {problem}", code=RESET)


def _problem(model: nn.Module, path: str) -> str | None:
    """Why a name cannot be preserved."""
    parent, _, last = path.rpartition(".")
    owner = dict(model.named_modules(remove_duplicate=False)).get(parent)
    if owner is None or not hasattr(owner, last):
        return f"the model has no attribute or method {path!r}"
    if last in ("forward", "training") or hasattr(RecursiveScriptModule, last):
        return f"{path!r} is a name that every TorchScript module has itself; remove or rename it"
    value = getattr(owner, last)
    if isinstance(value, nn.Module) or (parent and callable(value)):
        return (
            f"{path!r} is a submodule or a method of one; name attributes of submodules"
            f" ({parent or path}.NAME), or add a method to the model that calls it"
        )
    return None


def check_signature(model: nn.Module, spec: InputSpec) -> None:
    """Check that keyword inputs are parameters of `forward`.

    Raises:
        SpecError: `forward` has no parameter of that name.
    """
    if spec.style == "positional":
        return
    if isinstance(model, torch.jit.ScriptModule):
        arguments = model.forward.schema.arguments  # type: ignore[attr-defined]
        names = [argument.name for argument in arguments]
    else:
        parameters = inspect.signature(model.forward).parameters
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            return
        names = list(parameters)
    for item in spec.inputs:
        if item.name not in names:
            raise SpecError(
                f"input {item.name!r} is not a parameter of forward({', '.join(names)}); use its"
                " names, or a list"
            )


LARGE_BYTES = 500_000_000
"""A model above this size that only a build needs is discarded while it is built."""


def weights_digest(model: nn.Module) -> str:
    """`sha256:` over names, dtypes, shapes and bytes of all parameters, buffers and packed weights,
    ordered by name.
    """
    digest = hashlib.sha256()
    for name, value in sorted(_state(model).items()):
        for tensor in dense_parts(value):
            digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
            if tensor.numel():
                # unlike `Tensor.numpy`, this leaves the storage resizable
                digest.update(np.from_dlpack(bytes_of(tensor)).data)
    return f"sha256:{digest.hexdigest()}"


def _state(model: nn.Module) -> dict[str, object]:
    """The state dict of a model, and the buffers that it omits, since they are not persistent."""
    return {**dict(model.named_buffers()), **model.state_dict()}


def is_large(module: nn.Module) -> bool:
    """Whether a module's parameters and buffers take more than LARGE_BYTES."""
    return tensors_bytes(program_tensors(module)) > LARGE_BYTES


def free_tensors(tensors: Iterable[Tensor], in_use: Iterable[Tensor] = ()) -> None:
    """Free the memory of tensors.

    The tensors must never be read again, even if others still refer to them. Memory that cannot be
    resized (a mapped file, or shared with NumPy) is only dereferenced. Memory shared with a tensor
    of `in_use` is kept.
    """
    kept = addresses_of(in_use)
    for tensor in tensors:
        address = address_of(tensor)
        if address is None or address in kept:
            continue
        storage = tensor.untyped_storage()
        if storage.resizable():
            storage.resize_(0)
        else:
            tensor.data = tensor.data.new_empty(0)


def clear_frames(error: BaseException, handled: BaseException | None = None) -> None:
    """Clear the frames of an error and of its causes, whose local variables keep graphs and weights
    alive. It prints as before.

    Args:
        error: an error whose functions have ended.
        handled: an error that was already being handled before; it is left alone.
    """
    waiting: list[BaseException | None] = [error]
    seen = [handled]
    while waiting:
        cause = waiting.pop()
        if cause is None or cause in seen:
            continue
        seen.append(cause)
        traceback.clear_frames(cause.__traceback__)
        waiting += [cause.__cause__, cause.__context__, *getattr(cause, "exceptions", ())]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's own tensors by path, not copied."""
    state = _state(model)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}
