"""Coldpress freezer: freeze PyTorch models for the hardware they will serve on, prove it, and load them there.

    import freezer

    result = freezer.freeze(model, {"x": torch.randn(1, 3, 224, 224)}, out="resnet")     # here, for this machine
    print(result.verdict, result.reason)                                                  # published, kept-eager, rejected, failed

    model = freezer.load("resnet50", store="./store")                                     # the artifact for this machine
    logits = model(x).logits                                                              # checked against the input contract
    model.manifest.device_class, model.ladder                                             # what serves, and what was refused

    freezer.verify("resnet")                                                              # digests, contract, canary

Read `freezer/freeze.py` first. This package needs neither ray nor mlflow, and importing it imports no torch: the functions below do
when they are first used.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from freezer.device_class import DeviceClass
from freezer.errors import (
    CanaryError,
    ColdpressError,
    ContractError,
    FreezeError,
    IncompatibleError,
    IntegrityError,
    NotPublishedError,
    StoreUnreachableError,
    UsageError,
)
from freezer.limits import Limits, SamplingPolicy
from freezer.spec import Dim

if TYPE_CHECKING:
    from freezer.freeze import FreezeResult, freeze
    from freezer.frozen_model import FrozenModel
    from freezer.load import load
    from freezer.verify import verify

__all__ = [
    "CanaryError",
    "ColdpressError",
    "ContractError",
    "DeviceClass",
    "Dim",
    "FreezeError",
    "FreezeResult",
    "FrozenModel",
    "IncompatibleError",
    "IntegrityError",
    "Limits",
    "NotPublishedError",
    "SamplingPolicy",
    "StoreUnreachableError",
    "UsageError",
    "freeze",
    "load",
    "verify",
]

_LAZY = {
    "FreezeResult": "freezer.freeze",
    "freeze": "freezer.freeze",
    "FrozenModel": "freezer.frozen_model",
    "load": "freezer.load",
    "verify": "freezer.verify",
}
"""Public names whose modules import torch."""


def __getattr__(name: str) -> Any:
    """The public names that need torch, imported when they are first used."""
    if name not in _LAZY:
        raise AttributeError(f"module 'freezer' has no attribute {name!r}")
    import importlib  # here: the commands that only read never come to it

    return getattr(importlib.import_module(_LAZY[name]), name)


class _Package(ModuleType):
    """This package. Importing the module `freezer.freeze` must not hide the function `freezer.freeze`, and so for the others."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _LAZY and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
