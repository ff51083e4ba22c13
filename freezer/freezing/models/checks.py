"""Checks of a source model before anything is made from it: weights, mode, names to keep, and
parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.jit._script import RecursiveScriptModule
from torch.nn.parameter import is_lazy

from freezer.errors import SourceError, SpecError
from freezer.freezing.models.calls import copied
from freezer.spec import InputSpec

PRESERVE, RESET = "CP-PRESERVE", "CP-RESET"


def check_weights(name: str, model: nn.Module) -> None:
    """Check that every parameter and buffer has values.

    Raises:
        SourceError: one is on the meta device, or of a lazy layer that was never called; code
            CP-WEIGHTS-MISSING.
    """
    parameters = model.named_parameters()
    buffers = model.named_buffers()
    for path, tensor in (*parameters, *buffers):
        if is_lazy(tensor):
            problem = "is of a lazy layer, which gets its weights from the first call"
            remedy = "call the model once before freezing it, or load a state dict"
        elif tensor.is_meta:
            problem = "is on the meta device, without values"
            remedy = "load the weights (model.to_empty(device='cpu'), then load_state_dict)"
        else:
            continue
        message = f"{name}: {path} {problem}; {remedy}"
        raise SourceError(message, code="CP-WEIGHTS-MISSING")


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
    names = set()
    for name, module in model.named_modules():
        if getattr(module, "training", False):  # a frozen ScriptModule has no mode
            names.add(name)
    return names


def check_kept_names(
    name: str, model: nn.Module, preserve: Sequence[str], reset: str | None
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
        problem = _reset_problem(model, reset)
        if problem:
            raise SpecError(f"{name}: reset: {problem}", code=RESET)


def _problem(model: nn.Module, path: str) -> str | None:
    """Why a name cannot be preserved."""
    parent, _, last = path.rpartition(".")
    modules = dict(model.named_modules(remove_duplicate=False))
    owner = modules.get(parent)
    if owner is None:
        return f"{parent!r} of {path!r} is not a submodule"
    if last in ("forward", "training"):
        return f"{path!r} is always kept; remove it from preserve"
    if hasattr(RecursiveScriptModule, last):
        return f"{path!r} is a name that every TorchScript module uses itself; rename it"
    if not hasattr(owner, last):
        return f"the model has no attribute or method {path!r}"
    value = getattr(owner, last)
    if isinstance(value, nn.Module):
        return f"{path!r} is a submodule; name its attributes: {path}.NAME"
    if parent and callable(value):
        return f"{path!r} is a method of a submodule; add a method to the model that calls it"
    return None


def _reset_problem(model: nn.Module, name: str) -> str | None:
    """Why a name cannot be the reset method."""
    problem = _problem(model, name)
    if problem:
        return problem
    method = getattr(model, name)
    if not callable(method):
        return f"{name!r} is a {type(method).__name__}, expected a method without arguments"
    needed = _needed_arguments(method)
    if needed:
        return (
            f"{name}({', '.join(needed)}) takes arguments, expected none; add a method to the model"
            " that calls it with them"
        )
    return None


def _needed_arguments(method: Callable[..., object]) -> list[str]:
    """The required arguments of a method."""
    schema = getattr(method, "schema", None)
    if schema is not None:
        _, *arguments = schema.arguments  # the first is self
        return [argument.name for argument in arguments if not argument.has_default_value()]
    needed = []
    signature = inspect.signature(method)
    for parameter in signature.parameters.values():
        varying = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not varying:
            needed.append(parameter.name)
    return needed


def check_signature(model: nn.Module, spec: InputSpec) -> None:
    """Check that keyword inputs are parameters of `forward`.

    Raises:
        SpecError: `forward` has no parameter of that name.
    """
    if spec.style == "positional":
        return
    if isinstance(model, torch.jit.ScriptModule):
        schema = model.forward.schema  # type: ignore[attr-defined]
        names = [argument.name for argument in schema.arguments]
    else:
        signature = inspect.signature(model.forward)
        parameters = signature.parameters
        names = list(parameters)
        kinds = [parameter.kind for parameter in parameters.values()]
        if inspect.Parameter.VAR_KEYWORD in kinds:
            return
    for item in spec.inputs:
        if item.name not in names:
            raise SpecError(
                f"input {item.name!r} is not a parameter of forward({', '.join(names)}); use its"
                " names, or a list"
            )
