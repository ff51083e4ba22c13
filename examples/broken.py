"""The models of examples/broken.yaml: each is wrong, or hard to freeze, in a different way.

Some really stop a process: one segfaults, one takes memory, one never returns. They are harmless in
a child process with limits, as the catalog runs them.
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
    """A good model, which the failures of the others must not affect."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()]
    return nn.Sequential(*layers)


class BranchesOnValues(nn.Module):
    """Branches on the values of its input: a trace keeps one branch, TorchScript's compiler
    both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loud = nn.Linear(WIDTH, WIDTH)
        self.quiet = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Float32 [1, 64] to [1, 64]."""
        if x.sum() > 0:
            y: Tensor = self.loud(x)
        else:
            y = self.quiet(x)
        return y


def branches_on_values() -> nn.Module:
    """A model with data-dependent control flow."""
    return BranchesOnValues()


class RoutesToExperts(nn.Module):
    """Calls the expert that its input chooses: TorchScript does not compile a variable index into a
    list of modules.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Float32 [1, 64] to [1, 64]."""
        chosen = int(self.router(x).argmax())
        y: Tensor = self.experts[chosen](x)
        return y


def routes_to_experts() -> nn.Module:
    """A model with data-dependent control flow that no capture supports."""
    return RoutesToExperts()


class LoopsOverRows(nn.Module):
    """A running mean over the rows: a trace unrolls the loop, and is wrong for any other number of
    rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Float32 [n, 64] to [n, 64]."""
        mean = torch.zeros_like(x[0])
        means: list[Tensor] = []
        for row in range(x.shape[0]):
            mean = 0.5 * mean + 0.5 * x[row]
            means.append(mean)
        y: Tensor = self.head(torch.stack(means))
        return y


def loops_over_rows() -> nn.Module:
    """A model whose trace is correct only for the sizes of the example."""
    return LoopsOverRows()


class TrainsOnly(nn.Module):
    """Runs only in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Float32 [n, 64] to [n, 64]."""
        if not self.training:
            raise RuntimeError("this model can only be trained")
        y: Tensor = self.layer(x)
        return y


def trains_only() -> nn.Module:
    """A model that does not run in eval mode."""
    return TrainsOnly()


class TurnsNan(nn.Module):
    """Takes the logarithm of negative values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """NaN, float32 [n, 64]."""
        return torch.log(-1 - self.layer(x).square())


def turns_nan() -> nn.Module:
    """A model that always returns NaN."""
    return TurnsNan()


class WritesItsInput(nn.Module):
    """Normalizes its input in place, and so changes the caller's tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Float32 [n, 64] to [n, 64]."""
        x.sub_(x.mean(dim=1, keepdim=True))
        y: Tensor = self.layer(x)
        return y


def writes_its_input() -> nn.Module:
    """A model that mutates its input."""
    return WritesItsInput()


class DropsOutAlways(nn.Module):
    """Keeps dropout in eval mode, as models do that estimate their uncertainty from several
    calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, 4 * WIDTH)
        self.two = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Float32 [n, 64] to [n, 64], different at each call."""
        hidden = functional.dropout(torch.relu(self.one(x)), 0.1, training=True)
        y: Tensor = self.two(hidden)
        return y


def drops_out_always() -> nn.Module:
    """A model that is random in eval mode."""
    return DropsOutAlways()


class Float32Only(nn.Module):
    """Casts to float32 in its forward, so that there is no float64 reference."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Float32 [n, 64] to [n, 64]."""
        y: Tensor = self.layer(x.to(torch.float32))
        return y


def float32_only() -> nn.Module:
    """A model that does not run in float64."""
    return Float32Only()


class Names(nn.Module):
    """Returns text."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> dict[str, str]:
        """Return `label`: yes or no."""
        return {"label": "yes" if self.layer(x).mean() > 0 else "no"}


def names() -> nn.Module:
    """A model that does not return a tensor."""
    return Names()


def other_weights() -> nn.Module:
    """Different weights at every call, so that build and judge see different models."""
    torch.seed()
    return nn.Linear(WIDTH, WIDTH)


def raises() -> nn.Module:
    """Raises, because its file is missing."""
    raise FileNotFoundError("weights-of-last-week.bin is not there")


def hangs() -> nn.Module:
    """Never returns, and ignores SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


def leaves() -> nn.Module:
    """Ends the process, as some libraries do without a licence."""
    os._exit(7)


def segfaults() -> nn.Module:
    """Reads address 0."""
    ctypes.string_at(0)
    return nn.Identity()


def eats_memory(at_most_gb: float) -> nn.Module:
    """Takes 0.4 GB per second, slowly enough for the limit to be enforced.

    Args:
        at_most_gb: stop here, in 1e9 bytes, if no limit is enforced.
    """
    kept = []
    for _ in range(int(at_most_gb * 100)):
        kept.append(bytearray(b"x") * 10_000_000)
        time.sleep(0.025)
    raise MemoryError(f"took {len(kept) / 100:g} GB without being stopped")


def talks() -> nn.Module:
    """Prints 100 MB, then returns a good model."""
    line = "loading a shard of the weights …".ljust(99, ".") + "\n"
    for _ in range(100):
        sys.stdout.write(line * 10_000)
    sys.stdout.flush()
    return fine()
