"""What a source model must be before anything is made of it: weights that are there, and one mode."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from freezer.copies import copied
from freezer.errors import SourceError, SpecError


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
