"""Models with known effects of freezing.

TorchScript reads the types of attributes from annotations, so this module must not import
`annotations` from `__future__`."""

import torch
from torch import Tensor, nn


class ConvNet(nn.Module):
    """Three convolutions with their batch norms, and two dropouts."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [
            part
            for _ in range(3)
            for part in (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())
        ]
        self.features = nn.Sequential(*pairs, nn.Dropout(), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)


class Forking(nn.Module):
    """Runs a linear layer in a forked task."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        future = torch.jit.fork(self.linear, x)
        waited: Tensor = torch.jit.wait(future)
        return waited + x


class Tied(nn.Module):
    """Two layers with one weight, and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu())


class Stateful(nn.Module):
    """Changes a buffer in place, sets a number and a buffer, and has a reset method."""

    total: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("last", torch.zeros(4))
        self.calls, self.version, self.unread = 0, 1, 7

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.version
        self.total[:2].add_(out.sum())
        self.last = out.mean(0)
        self.calls += 1
        return out + self.total

    @torch.jit.export
    def reset(self) -> None:
        """Reset the state."""
        self.total.zero_()
        self.calls = 0
