"""Models with known effects of Inductor's freezing, and of its past defects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Known(nn.Module):
    """One of everything that a report counts; see `forward`. [2, 3, 8, 8] to four outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv3, self.drop = nn.Conv2d(8, 8, 1), nn.Dropout(0.5)
        self.query, self.key, self.value = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(8, 16)
        self.tied, self.other = nn.Linear(16, 16), nn.Linear(16, 16)
        self.other.weight = self.tied.weight
        self.unused = nn.Linear(3, 3)
        self.scale: Tensor = nn.Buffer(torch.rand(8, 1, 1) + 0.5)
        self.left: Tensor = nn.Buffer(torch.rand(16, 16))
        self.right: Tensor = nn.Buffer(torch.rand(16, 100))
        self.given: Tensor = nn.Buffer(torch.rand(100))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = torch.relu(self.norm1(self.conv1(x)))  # a batch norm, and an activation
        x = self.norm2(self.conv2(x))  # a batch norm
        x = self.conv3(x) * self.scale + 1.0  # a multiplication and an addition
        x = self.drop(x)
        y = self.drop(x.mean((2, 3)))
        z = torch.tanh(self.query(y)) * self.key(y) + torch.sigmoid(
            self.value(y)
        )  # two activations
        z = torch.exp(z * 2) / (
            torch.exp(z * 2) + 1
        )  # two common subexpressions: the product, and the exponential
        z = z.view(-1, 4, 4).transpose(1, 2).reshape(-1, 16)  # two views
        z = self.other(torch.relu(self.tied(z)))  # an activation, and a weight twice
        return (
            z,
            self.given,
            x,
            y.sum() + (self.left @ self.right).sum(0),
        )  # two operators on constants, 400 bytes


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
