"""Checks of a source model before anything is made from it: weights, mode, names to keep, and
parameters.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.jit._script import RecursiveScriptModule
from torch.nn.parameter import is_lazy

from freezer.errors import SourceError, SpecError
from freezer.freezing.models.calls import copied
from freezer.spec import ConstantSpec, InputSpec

PRESERVE, RESET = "CP-PRESERVE", "CP-RESET"


def check_weights(name: str, model: nn.Module) -> None:
    """Check that every parameter and buffer has values.

    Raises:
        SourceError: one is on the meta device, or of a lazy layer that was never called; code
            CP-WEIGHTS-MISSING.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lazy = [path for path, tensor in tensors if is_lazy(tensor)]
    meta = [path for path, tensor in tensors if not is_lazy(tensor) and tensor.is_meta]
    what = (
        "of lazy layers, which get their weights from the first call; call the model once before"
        " freezing it, or load a state dict"
    )
    if not lazy:
        what = (
            "on the meta device, without values; load the weights (model.to_empty(device='cpu'),"
            " then load_state_dict)"
        )
    if lazy or meta:
        raise SourceError(f"{name}: {_some(lazy or meta)} {what}", code="CP-WEIGHTS-MISSING")


def check_mode(model: nn.Module) -> None:
    """Check that a model and all its parts are in eval mode. Parts that its own `train` keeps in
    training mode are accepted.

    Raises:
        SpecError: the model or a part is in training mode.
    """
    if getattr(model, "training", False):  # a frozen ScriptModule has no mode
        raise SpecError("the model is in training mode; call model.eval() before freezing it")
    left = _training(model)
    if left and (forgotten := left - _training(copied(model).eval())):
        raise SpecError(
            f"{_some(sorted(forgotten))} in training mode, although the model is in eval mode; call"
            " model.eval() before freezing it"
        )


def _training(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if getattr(module, "training", False)}


def _some(names: list[str]) -> str:
    """The first of some names, and the number of others: `head.weight and 3 more are`."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more} {'are' if more else 'is'}"


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
        if problem := _problem(model, path):
            raise SpecError(f"{name}: preserve: {problem}", code=PRESERVE)
    if reset is not None and (problem := _reset_problem(model, reset)):
        raise SpecError(f"{name}: reset: {problem}", code=RESET)


def _problem(model: nn.Module, path: str) -> str | None:
    """Why a name cannot be preserved."""
    parent, _, last = path.rpartition(".")
    owner = dict(model.named_modules(remove_duplicate=False)).get(parent)
    if owner is None:
        return f"{parent!r} of {path!r} is not a submodule"
    if last in ("forward", "training"):
        return f"{path!r} is always kept; remove it from preserve"
    if hasattr(RecursiveScriptModule, last):
        return f"{path!r} is a name that every TorchScript module uses itself; rename it"
    if not hasattr(owner, last):
        near = difflib.get_close_matches(last, dir(owner), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"the model has no attribute or method {path!r}{hint}"
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


def _needed_arguments(method: Any) -> list[str]:
    """The required arguments of a method."""
    schema = getattr(method, "schema", None)
    if schema is not None:
        return [
            item.name
            for item in schema.arguments
            if item.name != "self" and not item.has_default_value()
        ]
    varying = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(method).parameters.values()
    return [
        item.name for item in parameters if item.default is item.empty and item.kind not in varying
    ]


def check_signature(model: nn.Module, spec: InputSpec) -> None:
    """Check that keyword inputs are parameters of `forward`.

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
            nested = (
                f"; declare {head!r} as a tuple, list or dict of its parts" if head in names else ""
            )
            raise SpecError(
                f"{what} {item.name!r} is not a parameter of forward({', '.join(names)}); use its"
                f" names, or a list{nested}"
            )
