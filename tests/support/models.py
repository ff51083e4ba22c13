"""Tiny models; sources name them as `python:tests.support.models:mlp`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from freezer.runtime.loaders import torchscript_deprecations_silenced


class Mlp(nn.Module):
    """[batch, 4] to [batch, 3]."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, hidden), nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


class TinyConv(nn.Module):
    """[batch, 3, 16, 16] to [batch, 10], with a batch norm to fold."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.Linear(8, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class Counter(nn.Module):
    """Adds the number of calls, kept in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor = torch.nn.Buffer(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x + self.count


class BakedCounter(Counter):
    """A Counter whose buffer a freeze has baked in: correct only on the first call."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.count + 1


class ReassignedCounter(Counter):
    """Replaces its buffer, which torch.export does not see."""

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x + self.count


class AttributeCounter(nn.Module):
    """Counts its calls in a Python number, which no graph contains."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Branching(nn.Module):
    """Has a branch that depends on the input; a trace keeps only one."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.sum()) > 0 else x * 3


class Writing(nn.Module):
    """Writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.add_(1))


class Random(nn.Module):
    """Draws random numbers in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class Masking(nn.Module):
    """Masks its input, with the masks of the first rows only if a number is given."""

    def __init__(self, rows: int | None = None) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask[: self.rows]


class Calling(nn.Module):
    """Calls a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def seeded(model: type[nn.Module], *args: Any) -> nn.Module:
    """A model in eval mode with seeded weights; the caller's random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model(*args).eval()


def scripted_module(model: nn.Module) -> nn.Module:
    """The model in eval mode, as torch.jit.script makes it."""
    with torchscript_deprecations_silenced():
        return torch.jit.script(model.eval())


def mlp(hidden: int = 8) -> nn.Module:
    """The factory of `python:tests.support.models:mlp`."""
    return seeded(Mlp, hidden)


def no_model() -> str:
    """A factory that does not return a module."""
    return "text"


def broken() -> nn.Module:
    """A factory that raises."""
    raise RuntimeError("weights are gone")


class Halving(nn.Module):
    """Halves its input until it is small; the number of steps depends on the values."""

    def forward(self, x: Tensor) -> Tensor:
        while bool(x.abs().max() > 1):
            x = x / 2
        return x


class Listing(nn.Module):
    """Sorts by values in Python that TorchScript does not compile: no capture is correct."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensor(sorted(x.tolist(), key=lambda row: row[0]))


def listing() -> nn.Module:
    """The factory of `python:tests.support.models:listing`."""
    return Listing().eval()


class Layers(nn.Module):
    """Layers that run one after the other, then a function of their result."""

    def __init__(self, *layers: nn.Module, then: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.layers, self.then = nn.ModuleList(layers), then

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.then(x)


def linear_then(function: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: Layers(nn.Linear(4, 4), then=function).eval()


class Stateful(nn.Module):
    """Reads a constant buffer, and one that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steady", torch.ones(1))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if int(self.steady):  # type: ignore[arg-type]
            x = x + 1
        if int(self.count) > 3:  # type: ignore[arg-type]
            x = x * 2
        self.count.add_(1)  # type: ignore[operator]
        return x
