"""LOADERS: the function that opens each kind of payload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from freezer.artifact.manifest import PayloadKind
from freezer.runtime.exported_loader import open_exported
from freezer.runtime.inductor_loader import open_inductor
from freezer.runtime.torchscript_loader import open_torchscript


class PayloadLoader(Protocol):
    """Open a payload. Needs no compiler.

    Args:
        path: the payload file.
        settings: the recipe's settings that the payload was made with.
        device: to run on.
        one_at_a_time: calls never overlap, as under a CUDA graph.

    Returns:
        A runner. That of a `flat` payload takes the tensor inputs in the manifest's order and returns the output tensors in order;
        that of a `native` payload is called as the source model is.
    """

    def __call__(
        self, path: Path, settings: Mapping[str, Any], device: torch.device = ..., *, one_at_a_time: bool = ...
    ) -> Callable[..., Any]:
        """Open a payload."""


LOADERS: Mapping[PayloadKind, PayloadLoader] = {
    "torchscript": open_torchscript,
    "inductor": open_inductor,
    "exported": open_exported,
}
