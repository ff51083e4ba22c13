"""Tiny models of the kinds that are served on GPUs, and settings of precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """[batch, 3, 32, 32] to [batch, 10]: convolutions with batch norm and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.norm = (
            nn.Conv2d(3, 32, 3, padding=1),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.BatchNorm2d(32),
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        return self.head(torch.relu(self.norm(self.conv(x)) + x).mean((2, 3)))


class Perceptron(nn.Module):
    """[batch, 64] to [batch, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 32)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Attention(nn.Module):
    """A transformer's block: [batch, 16, 64] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.norms = nn.ModuleList([nn.LayerNorm(64) for _ in range(2)])
        self.feed = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (4, 16)).transpose(1, 2)
            for part in self.project(self.norms[0](x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.feed(self.norms[1](x))


class Recurrent(nn.Module):
    """[batch, 12, 16] to [batch, 8]: an LSTM that starts from zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x)
        return self.head(hidden[:, -1])


SHAPES: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "resnet": (Residual, (4, 3, 32, 32)),
    "mlp": (Perceptron, (4, 64)),
    "attention": (Attention, (4, 16, 64)),
    "lstm": (Recurrent, (4, 12, 16)),
}
"""Each model with the shape of its input."""


def made(name: str, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, Tensor]:
    """A model in eval mode and an input, seeded."""
    kind, shape = SHAPES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = kind().eval(), torch.randn(shape)
    return model.to(device, dtype), x.to(device, dtype)


def settings_on_gpu() -> dict[str, Any]:
    """The float32 precision of each kind of operation, and whether half-precision sums are
    allowed.
    """
    found: dict[str, Any] = {
        name: torch._C._get_fp32_precision_getter("cuda", name)
        for name in ("matmul", "conv", "rnn")
    }
    for dtype in ("fp16", "bf16"):
        found[f"allow_{dtype}"] = getattr(
            torch._C, f"_get_cublas_allow_{dtype}_reduced_precision_reduction"
        )()
    return found
