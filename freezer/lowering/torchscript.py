"""TorchScript: a scripted or traced module, frozen or as it came."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from freezer.capture import Captured
from freezer.capture_errors import script_sentence
from freezer.errors import BuildError
from freezer.legacy import torchscript_deprecations_silenced
from freezer.report import Lowered
from freezer.target import Target

SUFFIX = ".pt"


def build(captured: Captured, path: Path, target: Target, settings: Mapping[str, Any]) -> Lowered:
    """Write a TorchScript file; with `freeze`, weights become constants and, with `optimize_numerics`, batch norms are folded.

    Raises:
        BuildError: torch.jit.freeze or save refuses.
    """
    with torchscript_deprecations_silenced(), torch.no_grad():
        module = captured.program.eval()
        try:
            if settings["freeze"]:
                module = torch.jit.freeze(module, optimize_numerics=settings["optimize_numerics"])
            torch.jit.save(module, str(path))
        except RuntimeError as error:
            raise BuildError(f"torchscript: {script_sentence(error)}") from error
    return Lowered()


def open_payload(path: Path, settings: Mapping[str, Any]) -> Callable[..., Any]:
    """A runner of the file; with `optimize_for_inference`, which torch.jit cannot save, it is optimized here."""
    with torchscript_deprecations_silenced():
        module = torch.jit.load(str(path), map_location="cpu").eval()
        if settings.get("optimize_for_inference"):
            module = torch.jit.optimize_for_inference(module)
    runner: Callable[..., Any] = module
    return runner
