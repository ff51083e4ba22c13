"""The architecture of a model: all that its speed depends on, without the values of its weights.

Models of one architecture, such as fine-tuned ones, have the same digest: what was measured of one
can be expected of another.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
from contextlib import suppress

from torch import nn

from freezer.codec import encode
from freezer.freezing.models import Subject
from freezer.freezing.recipes import RECIPES
from freezer.freezing.target import Target, toolchain


def architecture_digest(subject: Subject, target: Target) -> str:
    """Digest of a model's modules, the names, dtypes and shapes of its tensors, its inputs and
    points.

    What turns it into candidates is part of it: the toolchain and all recipes. So figures of other
    versions are not compared.
    """
    model = subject.model
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    kinds = {type(module) for module in model.modules()}
    parts = {
        "modules": [(name, _kind(module), _text(module)) for name, module in model.named_modules()],
        "tensors": [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors],
        "code": sorted(_code(kind) for kind in kinds if not kind.__module__.startswith("torch.")),
        "inputs": encode(subject.spec),
        "points": [dict(point) for point in subject.points],
        "toolchain": dict(toolchain(target.device)),
        "recipes": [encode(recipe) for recipe in RECIPES.values()],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _kind(module: nn.Module) -> str:
    """The class of a module; of TorchScript, the original one."""
    return str(getattr(module, "original_name", type(module).__qualname__))


def _text(module: nn.Module) -> str:
    """The settings of a module, like those of a convolution; empty if its own method for them
    fails.
    """
    with suppress(Exception):  # the user's code
        return module.extra_repr()
    return ""


def _code(kind: type) -> str:
    """The source of a class; empty if there is none."""
    with suppress(OSError, TypeError):
        return inspect.getsource(kind)
    return ""
