"""Scriptable models with state between calls, attributes to preserve, and several methods."""

from typing import Final

import torch
from torch import Tensor, nn


class InPlace(nn.Module):
    """Counts its calls in a buffer that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.count: Tensor = nn.Buffer(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return self.linear(x) * self.count

    @torch.jit.export
    def reset(self) -> None:
        self.count.zero_()


class Number(nn.Module):
    """Counts its calls in a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * self.calls

    @torch.jit.export
    def reset(self) -> None:
        self.calls = 0


class RunningMean(nn.Module):
    """Subtracts the running mean of all rows, kept in two buffers; [batch, 3, 8, 8] through a
    convolution to fold.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.mean: Tensor = nn.Buffer(torch.zeros(4))
        self.num_seen: Tensor = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        self.num_seen += x.shape[0]
        self.mean += (y.mean((2, 3)) - self.mean).sum(0) / self.num_seen
        return y - self.mean[:, None, None]

    @torch.jit.export
    def reset(self) -> None:
        self.mean.zero_()
        self.num_seen.zero_()


class HiddenState(nn.Module):
    """A GRU cell whose hidden state is a buffer, and an unused version."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 6)
        self.version = 1
        self.hidden: Tensor = nn.Buffer(torch.zeros(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.cell(x, self.hidden.expand(x.shape[0], 6)).mean(0, keepdim=True)
        return self.hidden * 1

    @torch.jit.export
    def reset(self) -> None:
        self.hidden = torch.zeros(1, 6)


class OptionalState(nn.Module):
    """An LSTM cell in a submodule, whose state is None until the first call and after `reset`."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.memory(x))

    @torch.jit.export
    def reset(self) -> None:
        self.memory.clear()


class Memory(nn.Module):
    """The LSTM cell and its state."""

    hidden: Tensor | None  # must not be text, as `from __future__ import annotations` would make it
    state: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 6)
        self.hidden = None
        self.state = None

    def forward(self, x: Tensor) -> Tensor:
        hidden, state = self.hidden, self.state
        if hidden is None or state is None:
            hidden, state = (
                torch.zeros(x.shape[0], 6, dtype=x.dtype),
                torch.zeros(x.shape[0], 6, dtype=x.dtype),
            )
        hidden, state = self.cell(x, (hidden, state))
        self.hidden, self.state = hidden, state
        return hidden

    @torch.jit.export
    def clear(self) -> None:
        self.hidden = None
        self.state = None


class Part(nn.Module):
    """A submodule with attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.version = 3

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale

    @torch.jit.export
    def bump(self) -> None:
        self.version += 1


class Holder(nn.Module):
    """Holds a Part, so that names with two dots can be preserved."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class Versioned(nn.Module):
    """Attributes of every kind, methods with arguments, and a convolution with a batch norm that
    both forward and a method call.
    """

    names: list[str]
    sizes: dict[str, int]

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.sub, self.holder = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            Part(),
            Holder(),
        )
        self.version = 1
        self.title = "first"
        self.enabled = True
        self.bias = 0.5
        self.inputs = 7
        self.names = ["a", "b"]
        self.sizes = {"a": 1}
        self.offset: Tensor = nn.Buffer(torch.zeros(4))
        self.tokenizer = object()

    def forward(self, x: Tensor) -> Tensor:
        y = self.encode(x, 1.0) + self.bias + self.offset[:, None, None]
        out: Tensor = self.holder(self.sub(y))
        return out * self.inputs

    @torch.jit.export
    def encode(self, x: Tensor, factor: float = 1.0) -> Tensor:
        out: Tensor = self.norm(self.conv(x))
        return out * factor

    @torch.jit.export
    def describe(self) -> tuple[str, int]:
        return self.title, self.version

    @torch.jit.export
    def upgrade(self, by: int) -> int:
        self.version += by
        return self.version

    def plain(self) -> int:
        return self.version


class Constant(nn.Module):
    """Has a read-only constant."""

    rate: Final[int]

    def __init__(self) -> None:
        super().__init__()
        self.rate = 16

    def forward(self, x: Tensor) -> Tensor:
        return x * self.rate
