"""Tiny models of the kinds that are served on GPUs."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions with batch norms, and what goes past them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(out)) + x)


class ResNet(nn.Module):
    """[batch, 3, 32, 32] to [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(3, 32, 3, padding=1), nn.Sequential(Block(32), Block(32)), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(torch.relu(self.stem(x))).mean((2, 3)))
        return out


class Mlp(nn.Module):
    """[batch, 64] to [batch, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 32))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Attention(nn.Module):
    """A transformer's block: [batch, 16, 64] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out, self.norms = (
            nn.Linear(64, 192),
            nn.Linear(64, 64),
            nn.ModuleList([nn.LayerNorm(64) for _ in range(2)]),
        )
        self.feed = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.project(self.norms[0](x)).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        out: Tensor = x + self.feed(self.norms[1](x))
        return out


class Recurrent(nn.Module):
    """[batch, 12, 16] to [batch, 8]: an LSTM that begins with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x)
        out: Tensor = self.head(hidden[:, -1])
        return out


class Counter(nn.Module):
    """Adds the number of calls, which a buffer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor = nn.Buffer(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x + self.count


SHAPES: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "resnet": (ResNet, (4, 3, 32, 32)),
    "mlp": (Mlp, (4, 64)),
    "attention": (Attention, (4, 16, 64)),
    "lstm": (Recurrent, (4, 12, 16)),
}
"""By name, a model and the shape of its input."""


def made(name: str, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, Tensor]:
    """A model in eval mode and an input, the same everywhere."""
    kind, shape = SHAPES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = kind().eval(), torch.randn(shape)
    return model.to(device, dtype), x.to(device, dtype)
