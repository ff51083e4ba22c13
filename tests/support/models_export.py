"""EXPORT: a tiny model for every row of "Corners" about torch.export in
docs/reference/what-freezes.md.
"""

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, library, nn

from tests.support.cases import BAKED_IN, VALUES, Case
from tests.support.models import Branching
from tests.support.steps import BATCH


class Unsupported(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * 2)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class AutogradFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Double.apply(x) + 1


library.define("coldpress_tests::unfaked", "(Tensor x) -> Tensor")
library.impl("coldpress_tests::unfaked", "CPU", lambda x: x * 2)


class Unfaked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.coldpress_tests.unfaked(x) + 1


class Wrapped(nn.Module):
    """Holds parts in torch.compile and nn.DataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager")
        self.parallel = nn.DataParallel(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.parallel(self.compiled(x))


class PythonRandom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class WritesPart(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[0] = 0
        return x * 2


class Item(nn.Module):
    """Computes with a number that it reads from a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.abs().sum().item()


class BySize(nn.Module):
    """Takes another way for larger batches."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 2 else x * 3


class Setting(nn.Module):
    """Keeps a tensor of its last call as an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return self.last + 1


EXPORT: Mapping[str, Case] = {
    "a branch or a number of iterations that depends on values": Case(
        make=Branching, exported=VALUES
    ),
    "a branch on a size": Case(
        make=BySize,
        dims={"x": {0: BATCH}},
        exported="no program takes all declared sizes of batch: .*; declare min: 3, max: 4 for",
    ),
    "`.item()` in arithmetic": Case(make=Item),
    "NumPy inside `forward`": Case(
        make=Unsupported,
        says=(
            "TorchScript's Tensor has no 'numpy' at models_export.py:.*; use torch's own operations"
        ),
    ),
    "`torch.autograd.Function`": Case(
        make=AutogradFunction, says="calls the Python function 'Double' .*, which no file can hold"
    ),
    "a custom operator without a fake kernel": Case(
        make=Unfaked,
        says="the graph calls coldpress_tests::unfaked, .*; write it in torch's operations",
        exported="unfaked.default has no fake kernel, .*register_fake",
    ),
    "`torch.compile` around the model or a part, `nn.DataParallel`": Case(
        make=lambda: torch.compile(Wrapped(), backend="eager")
    ),
    "writes into a part of its input": Case(
        make=WritesPart, says=r"writes into its input 'x', .*`x = x\.clone\(\)`"
    ),
    "keeps a tensor of its last call as an attribute": Case(make=Setting),
    "`random.random()`, the clock, a counter in a global": Case(
        make=PythonRandom,
        says=BAKED_IN,
    ),
}
