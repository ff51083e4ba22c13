"""The models of examples/broken.yaml: each is wrong, or hard, in a way of its own.

What can stop a process really does: one dies of a segmentation fault, one takes memory, one never returns. They are harmless to
whoever runs them as the catalog does, in a child process with limits.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 64


def fine() -> nn.Module:
    """Nothing is wrong here: what happens to the others must not touch this one."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()]
    return nn.Sequential(*layers)


class BranchesOnValues(nn.Module):
    """Takes one of two ways by what its input holds: a trace would keep one of them, TorchScript's compiler keeps both."""

    def __init__(self) -> None:
        super().__init__()
        self.loud = nn.Linear(WIDTH, WIDTH)
        self.quiet = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Float32 [1, 64] of the same."""
        if x.sum() > 0:
            y: Tensor = self.loud(x)
        else:
            y = self.quiet(x)
        return y


def branches_on_values() -> nn.Module:
    """A model with data-dependent control flow."""
    return BranchesOnValues()


class RoutesToExperts(nn.Module):
    """Asks one of its experts, which its input chooses: a list of modules and no constant index is beyond TorchScript too."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Float32 [1, 64] of the same."""
        chosen = int(self.router(x).argmax())
        y: Tensor = self.experts[chosen](x)
        return y


def routes_to_experts() -> nn.Module:
    """A model with data-dependent control flow that no capture takes."""
    return RoutesToExperts()


class LoopsOverRows(nn.Module):
    """A running mean over the rows: a trace unrolls the loop for the rows that it saw, and answers wrongly for any other number."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Float32 [n, 64] of the same."""
        mean = torch.zeros_like(x[0])
        means: list[Tensor] = []
        for row in range(x.shape[0]):
            mean = 0.5 * mean + 0.5 * x[row]
            means.append(mean)
        y: Tensor = self.head(torch.stack(means))
        return y


def loops_over_rows() -> nn.Module:
    """A model whose trace is right for the sizes of the example alone."""
    return LoopsOverRows()


class TrainsOnly(nn.Module):
    """Runs in training mode and in no other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Float32 [n, 64] of the same."""
        if not self.training:
            raise RuntimeError("this model can only be trained")
        y: Tensor = self.layer(x)
        return y


def trains_only() -> nn.Module:
    """A model that does not run in eval mode."""
    return TrainsOnly()


class TurnsNan(nn.Module):
    """Takes the logarithm of what is never positive."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """NaN, float32 [n, 64]."""
        return torch.log(-1 - self.layer(x).square())


def turns_nan() -> nn.Module:
    """A model that answers NaN to everything."""
    return TurnsNan()


class WritesItsInput(nn.Module):
    """Normalizes its input in place: the caller's tensor is another one afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Float32 [n, 64] of the same."""
        x.sub_(x.mean(dim=1, keepdim=True))
        y: Tensor = self.layer(x)
        return y


def writes_its_input() -> nn.Module:
    """A model that mutates its input."""
    return WritesItsInput()


class DropsOutAlways(nn.Module):
    """Keeps its dropout in eval mode, as models do whose spread over several calls is their uncertainty."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, 4 * WIDTH)
        self.two = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Float32 [n, 64] of the same, another one at each call."""
        hidden = functional.dropout(torch.relu(self.one(x)), 0.1, training=True)
        y: Tensor = self.two(hidden)
        return y


def drops_out_always() -> nn.Module:
    """A model that is random in eval mode."""
    return DropsOutAlways()


class Float32Only(nn.Module):
    """Casts to float32 in its forward, so that no float64 reference can be had."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Float32 [n, 64] of the same."""
        y: Tensor = self.layer(x.to(torch.float32))
        return y


def float32_only() -> nn.Module:
    """A model that float64 is impossible for."""
    return Float32Only()


class Names(nn.Module):
    """Answers in words."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> dict[str, str]:
        """`label`: yes or no."""
        return {"label": "yes" if self.layer(x).mean() > 0 else "no"}


def names() -> nn.Module:
    """A model that gives no tensor."""
    return Names()


def other_weights() -> nn.Module:
    """Other weights at every call: what is built and what is judged are not the same model."""
    torch.seed()
    return nn.Linear(WIDTH, WIDTH)


def raises() -> nn.Module:
    """Raises: what it reads is not there."""
    raise FileNotFoundError("weights-of-last-week.bin is not there")


def hangs() -> nn.Module:
    """Never returns, and does not listen to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


def leaves() -> nn.Module:
    """Ends the process, as some libraries do where they find no licence."""
    os._exit(7)


def segfaults() -> nn.Module:
    """Reads what lies at address 0."""
    ctypes.string_at(0)
    return nn.Identity()


def eats_memory(at_most_gb: float) -> nn.Module:
    """Takes 0.4 GB a second, slowly enough for the limit to strike.

    Args:
        at_most_gb: where it stops, in 1e9 bytes, should no limit ever strike.
    """
    kept = []
    for _ in range(int(at_most_gb * 100)):
        kept.append(bytearray(b"x") * 10_000_000)
        time.sleep(0.025)
    raise MemoryError(f"took {len(kept) / 100:g} GB, and nothing stopped it")


def talks() -> nn.Module:
    """Prints 100 MB, and then gives a model in which nothing is wrong."""
    line = "loading a shard of the weights …".ljust(99, ".") + "\n"
    for _ in range(100):
        sys.stdout.write(line * 10_000)
    sys.stdout.flush()
    return fine()
