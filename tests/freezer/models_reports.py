"""Models with known effects of freezing.

TorchScript reads the types of attributes from annotations, so this module must not import `annotations` from `__future__`.
"""

import torch
from torch import Tensor, nn


class ConvNet(nn.Module):
    """Three convolutions with their batch norms, and two dropouts."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [part for _ in range(3) for part in (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())]
        self.features = nn.Sequential(*pairs, nn.Dropout(), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.features(x)
        return out


class Arithmetic(nn.Module):
    """A convolution, followed by arithmetic with constants."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("shift", torch.rand(1, 4, 1, 1) + 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (((self.conv(x) + self.shift) - 2.0) * self.shift) / 3.0
        return out


class Heads(nn.Module):
    """Three linear layers over one input, and one with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.out, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.out(self.query(x) + self.key(x) * self.value(x)))
        return out


class Repeating(nn.Module):
    """Computes sin and a sum twice, a constant once, and detaches."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4) / 3)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.sin() + x, x.sin() + x
        return (first * second).detach() * self.scale.exp()


class Looping(nn.Module):
    """A loop that TorchScript unrolls, and a branch on a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.steps, self.doubled = 3, False

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        for _ in range(3):
            x = self.linear(x)
            found.append(x)
        if self.doubled:
            x = x * 2
        return torch.cat(found) + self.steps + x.sum()


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
        out: Tensor = self.two(self.one(x).relu())
        return out


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


class Adding(nn.Module):
    """Sums its inputs in a buffer."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.sum())
        return x + self.total


class Holder(nn.Module):
    """Holds another model as `model`, like a flat capture."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Tied()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out


class Recurrent(nn.Module):
    """An LSTM, whose weights TorchScript reads from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x)[0]
        return out.relu()


class Mixed(nn.Module):
    """A linear layer under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out: Tensor = self.linear(x)
        return out


class Viewing(nn.Module):
    """Writes into its buffer for some inputs, and into a copy of its input for others."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        written = self.total if x.dim() > 2 else x.clone()
        written.add_(1.0)
        return written
