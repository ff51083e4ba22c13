"""Coldpress freezer: freeze PyTorch models for the hardware they serve on, validate them, and load
them there.

    import freezer

    result = freezer.freeze(model, {"x": torch.randn(1, 3, 224, 224)}, out="resnet")
    print(result.verdict, result.reason)  # published, kept-eager, rejected, failed

    model = freezer.load("resnet50", store="./store")  # the artifact for this machine
    logits = model(x).logits  # checked against the input contract
    model.manifest.device_class, model.ladder  # the artifact in use, and those refused

    freezer.verify("resnet")  # digests, contract, canary

`freezer.serving` runs in deployments, `freezer.freezing` makes artifacts; serving never imports
freezing. Read `freezing/freeze.py` and `serving/load.py` first. This package needs neither ray nor
mlflow. Importing it imports no torch: the functions do when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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
    without_torch,
)

if TYPE_CHECKING:
    from freezer.freezing.freeze import FreezeOptions, FreezeResult, freeze
    from freezer.hardware import DeviceClass
    from freezer.runtime.frozen_model import FrozenModel
    from freezer.serving.load import load
    from freezer.serving.process import LoadOptions
    from freezer.serving.verify import verify
    from freezer.spec import Dim, Limits, SamplingPolicy

__all__ = [
    "CanaryError",
    "ColdpressError",
    "ContractError",
    "DeviceClass",
    "Dim",
    "FreezeError",
    "FreezeOptions",
    "FreezeResult",
    "FrozenModel",
    "IncompatibleError",
    "IntegrityError",
    "Limits",
    "LoadOptions",
    "NotPublishedError",
    "SamplingPolicy",
    "StoreUnreachableError",
    "UsageError",
    "freeze",
    "load",
    "verify",
]

_LAZY = {
    "DeviceClass": "freezer.hardware",
    "Dim": "freezer.spec",
    "Limits": "freezer.spec",
    "SamplingPolicy": "freezer.spec",
    "FreezeOptions": "freezer.freezing.freeze",
    "FreezeResult": "freezer.freezing.freeze",
    "freeze": "freezer.freezing.freeze",
    "FrozenModel": "freezer.runtime.frozen_model",
    "LoadOptions": "freezer.serving.process",
    "load": "freezer.serving.load",
    "verify": "freezer.serving.verify",
}
"""Public names whose modules are imported when they are first used."""


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'freezer' has no attribute {name!r}")
    try:
        module = importlib.import_module(_LAZY[name])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise without_torch(f"freezer.{name}") from None
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
