"""Four small models for a fleet: convolutions, attention, an LSTM with state, and scripted control
flow.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn


def convolutions() -> nn.Module:
    """Two convolutions with a batch norm, and a classifier; takes [batch, 3, 16, 16]."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.Flatten(),
        nn.Linear(392, 10),
    )


class Attention(nn.Module):
    """Self-attention of four heads, and a layer norm; takes [batch, length, 32].

    Its weights are normal: torch's fill gives other numbers on Arm than on x86.
    """

    def __init__(self) -> None:
        super().__init__()
        self.projection, self.norm = nn.Linear(32, 96), nn.LayerNorm(32)
        nn.init.normal_(self.projection.weight, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.projection(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        return self.norm(x + mixed.transpose(1, 2).flatten(2))


class Stream(nn.Module):
    """An LSTM cell whose state is kept between calls; takes [1, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 16)
        self.hidden: Tensor = nn.Buffer(torch.zeros(1, 16))
        self.memory: Tensor = nn.Buffer(torch.zeros(1, 16))

    def forward(self, x: Tensor) -> Tensor:
        hidden, memory = self.cell(x, (self.hidden, self.memory))
        self.hidden.copy_(hidden)
        self.memory.copy_(memory)
        return hidden

    @torch.jit.export
    def reset(self) -> None:
        self.hidden.zero_()
        self.memory.zero_()


class Branches(nn.Module):
    """Takes other layers for other values; takes [batch, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.mean() > 0):
            return self.high(x)
        y = self.low(x)
        for _ in range(int(x.shape[0])):
            y = torch.tanh(y)
        return y


def branches() -> nn.Module:
    """The scripted model."""
    return torch.jit.script(Branches())


def slow(seconds: float) -> nn.Module:
    """A layer that takes its time to load, so that a node can die in its build."""
    time.sleep(seconds)
    return nn.Linear(16, 16)
