"""Open TorchScript files.

Coldpress uses torch.jit on purpose: existing fleets are TorchScript. Inductor's own modules use it
too.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from freezer.runtime.contract import Runner
from freezer.runtime.devices import CPU


@contextlib.contextmanager
def torchscript_deprecations_silenced() -> Iterator[None]:
    """Silence only notices that TorchScript is deprecated."""
    with warnings.catch_warnings():
        for category in (FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", message=r".*torch\.jit\.", category=category)
        yield


def open_torchscript(
    path: Path,
    settings: Mapping[str, object],
    device: torch.device = CPU,
) -> Runner:
    """Open a file on a device; `optimize_for_inference`, which torch.jit cannot save, is applied
    here.

    The module is saved in eval mode. Do not call `eval()`: it would add an attribute `training`, so
    that torch.jit.optimize_for_inference freezes the module again and drops preserved names.

    Raises:
        RuntimeError: the file is not TorchScript, or torch.jit.optimize_for_inference fails on this
            machine.
    """
    with torchscript_deprecations_silenced(), torch.no_grad():
        module = torch.jit.load(str(path), map_location=device)
        if settings.get("optimize_for_inference"):
            others = {*module._c._method_names()} - {"forward"}
            module = torch.jit.optimize_for_inference(module, other_methods=sorted(others))
    runner: Runner = module
    return runner
