"""What a source model must be before anything is made of it: weights that are there, and one mode."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.jit._script import RecursiveScriptModule
from torch.nn.parameter import is_lazy

from freezer.errors import SourceError, SpecError
from freezer.freezing.models.cloning import copied
from freezer.spec.inputs import InputSpec
from freezer.spec.items import ConstantSpec

PRESERVE, RESET = "CP-PRESERVE", "CP-RESET"


def check_weights(name: str, model: nn.Module) -> None:
    """Hold that every parameter and buffer has values.

    Raises:
        SourceError: some are on the meta device, or of lazy layers that were never called; code CP-WEIGHTS-MISSING.
    """
    held = [*model.named_parameters(), *model.named_buffers()]
    lazy = [path for path, tensor in held if is_lazy(tensor)]
    if lazy:
        raise SourceError(
            f"{name}: {_some(lazy)} of lazy layers, which get their weights from the first call; call the model once before "
            "freezing it, or load a state dict",
            code="CP-WEIGHTS-MISSING",
        )
    meta = [path for path, tensor in held if tensor.is_meta]
    if meta:
        raise SourceError(
            f"{name}: {_some(meta)} on the meta device, without values; load the weights (model.to_empty(device='cpu'), then "
            "load_state_dict)",
            code="CP-WEIGHTS-MISSING",
        )


def check_mode(model: nn.Module) -> None:
    """Hold that a model is in eval mode, all of it. What a model's own `train` keeps in training mode is as it is meant.

    Raises:
        SpecError: it is in training mode, or a part of it is.
    """
    if getattr(model, "training", False):  # a frozen ScriptModule has no mode
        raise SpecError("the model is in training mode; call model.eval() before freezing it")
    left = _training(model)
    if left and (forgotten := left - _training(copied(model).eval())):
        raise SpecError(
            f"{_some(sorted(forgotten))} in training mode, within a model in eval mode; call model.eval() before freezing it"
        )


def _training(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if getattr(module, "training", False)}


def _some(names: list[str]) -> str:
    """The first of some names, and how many more there are: `head.weight and 3 more are`."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more} {'are' if more else 'is'}"


def check_kept_names(name: str, model: nn.Module, preserve: Sequence[str], reset: str | None) -> None:
    """Hold names to preserve, and the reset method, against the model.

    Args:
        name: of the entry.
        model: the source model.
        preserve: attributes, methods and attributes of submodules (`sub.attr`).
        reset: a method of the model that takes no arguments.

    Raises:
        SpecError: a name is not there, or no frozen model can have it (code CP-PRESERVE); or `reset` is no such method (CP-RESET).
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
    *parts, last = path.split(".")
    owner: Any = model
    for index, part in enumerate(parts):
        below = {name: child for name, child in owner._modules.items() if child is not None}  # of a shared one each name
        if part not in below:
            return f"{'.'.join(parts[: index + 1])!r} of {path!r} is no submodule{_instead(part, below)}"
        owner = below[part]
    if last in ("forward", "training"):
        why = "is always kept" if last == "forward" else "of a frozen model is False for good"
        return f"{path!r} {why}; leave it out"
    if hasattr(RecursiveScriptModule, last):
        return f"{path!r} is a name that every TorchScript module has of its own; rename it"
    if not _has(owner, last):
        what = f"submodule {'.'.join(parts)}" if parts else "model"
        return f"the {what} has no attribute or method {last!r}{_instead(last, _names(owner))}"
    value = getattr(owner, last)
    if isinstance(value, nn.Module):
        return f"{path!r} is a submodule; name its attributes: {path}.NAME"
    if parts and callable(value):
        return f"{path!r} is a method of a submodule, which freezing drops; give the model itself a method that calls it"
    return None


def _reset_problem(model: nn.Module, name: str) -> str | None:
    """Why a name is no reset method."""
    if "." in name:
        return f"{name!r} is a method of a submodule; give the model itself a method that calls it"
    problem = _problem(model, name)
    if problem:
        return problem
    method = getattr(model, name)
    if not callable(method):
        return f"{name!r} is a {type(method).__name__}, expected a method without arguments"
    needed = _needed_arguments(method)
    if needed:
        return f"{name}({', '.join(needed)}) takes arguments, expected a method without; give the model one that calls it with them"
    return None


def _needed_arguments(method: Any) -> list[str]:
    """The arguments that a method must be given."""
    schema = getattr(method, "schema", None)
    if schema is not None:
        return [item.name for item in schema.arguments if item.name != "self" and not item.has_default_value()]
    varying = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(method).parameters.values()
    return [item.name for item in parameters if item.default is item.empty and item.kind not in varying]


def _has(owner: nn.Module, name: str) -> bool:
    if isinstance(owner, torch.jit.ScriptModule):
        return bool(owner._c.hasattr(name) or owner._c._has_method(name))
    return hasattr(owner, name)


def _names(owner: nn.Module) -> list[str]:
    """Names that might have been meant: what the module has besides what every module has. TorchScript lists no attributes."""
    methods = owner._c._method_names() if isinstance(owner, torch.jit.ScriptModule) else []
    names = {*dir(owner), *methods}
    return sorted(name for name in names if not name.startswith("_") and not hasattr(RecursiveScriptModule, name))


def _instead(name: str, there: Iterable[str]) -> str:
    names = sorted(there)
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(names[:10]) or 'none'}"


def check_signature(model: nn.Module, spec: InputSpec) -> None:
    """Hold keyword inputs against the parameters of `forward`.

    Raises:
        SpecError: `forward` has no parameter of that name.
    """
    if spec.style == "positional":
        return
    if isinstance(model, torch.jit.ScriptModule):
        schema = model.forward.schema  # type: ignore[attr-defined]
        names = [argument.name for argument in schema.arguments if argument.name != "self"]
    else:
        parameters = inspect.signature(model.forward).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return
        names = [parameter.name for parameter in parameters]
    for item in spec.inputs:
        if item.name not in names:
            what = "constant input" if isinstance(item, ConstantSpec) else "input"
            head = item.name.partition(".")[0]
            nested = f"; declare {head!r} as a tuple, list or dict of its parts" if head in names else ""
            raise SpecError(
                f"{what} {item.name!r} is no parameter of forward({', '.join(names)}); name its parameters, or give a list{nested}"
            )
