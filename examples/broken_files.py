"""Writers of the files of examples/broken.yaml; examples/prepare.py calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from examples.broken import WIDTH
from freezer.runtime.loaders import torchscript_deprecations_silenced


class NamesAGpu(nn.Module):
    """Creates a tensor on the first GPU, regardless of the model's device."""

    def forward(self, x: Tensor) -> Tensor:
        """Float32 [n, 64] to [n, 64]."""
        return x + torch.ones(x.shape[1], device="cuda:0")


def write_names_a_gpu(path: Path) -> str:
    """Script a model that names cuda:0; this does not need a GPU."""
    _write_scripted(NamesAGpu(), path)
    return "a scripted model that names cuda:0"


def write_cut_short(path: Path) -> str:
    """Write the first half of a TorchScript file."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _write_scripted(nn.Linear(WIDTH, WIDTH), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return "the first half of a TorchScript file"


def _write_scripted(model: nn.Module, path: Path) -> None:
    with torchscript_deprecations_silenced():
        torch.jit.save(torch.jit.script(model.eval()), str(path))


BROKEN_FILES: Mapping[str, Callable[[Path], str]] = {
    "names-a-gpu.jit": write_names_a_gpu,
    "cut-short.jit": write_cut_short,
}
"""The writer of each file; it takes a path and returns a description."""
