"""Models with known effects of Inductor's freezing, and of its past defects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Known(nn.Module):
    """Convolutions with a batch norm, linear layers of which two share their weight, and a buffer
    as an output. [2, 3, 8, 8] to three outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
        self.first, self.tied, self.other = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.other.weight = self.tied.weight
        self.drop, self.unused = nn.Dropout(0.5), nn.Linear(3, 3)
        self.given: Tensor = nn.Buffer(torch.rand(100))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.last(torch.relu(self.norm(self.conv(x))))
        y = torch.tanh(self.first(self.drop(x).mean((2, 3))))
        return self.other(torch.relu(self.tied(y))), self.given, x


OF_PYTHON_MODULE = torch.linspace(-1, 1, 64).reshape(8, 8)


class Scalars(nn.Module):
    """Two convolutions with scalar products and sums, and linear layers over one vector, the first
    with weights from the Python module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.last(self.first(x) * 2.0 + 0.5) * 3.0 - 0.25
        return x, self.head(functional.linear(x.mean((0, 2, 3)), OF_PYTHON_MODULE[:4, :4]))


class Wide(nn.Module):
    """Linear layers over `width` numbers: about `4e-6 * layers * width ** 2` MB."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Shared:
    """Holds a tensor that copies share, like a cache."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        return self


class Foreign(nn.Module):
    """Linear layers with tensors that no copy owns: of the Python module, the class, a closure and
    a shared attribute; and layers with own weights, two of them in branches. [batch, 8] to [batch,
    8]."""

    OF_CLASS = torch.linspace(1, 2, 64).reshape(8, 8)

    def __init__(self) -> None:
        super().__init__()
        of_closure = torch.rand(8, 8)
        self.enclosed: Callable[[Tensor], Tensor] = lambda x: functional.linear(x, of_closure)
        self.shared = Shared(torch.rand(8, 8))
        self.head, self.positive, self.negative = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.theirs = (OF_PYTHON_MODULE, self.OF_CLASS, of_closure, self.shared.table)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.linear(functional.linear(x, OF_PYTHON_MODULE), self.OF_CLASS)
        x = self.head(functional.linear(self.enclosed(x), self.shared.table))
        return torch.cond(x.sum() > 0, self.positive, self.negative, (x,))
