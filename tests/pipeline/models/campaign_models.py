"""Tiny real models, and factories that fail in their own ways, for campaigns under test."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn


def good(width: int = 16) -> nn.Module:
    """A small stack of linear layers that TorchScript freezing makes faster."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()]
    return nn.Sequential(*layers)


class Busy(nn.Module):
    """A layer after a number of products with the identity: the same answers, later."""

    def __init__(self, work: int) -> None:
        super().__init__()
        self.work, self.layer = work, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Waste time, then answer."""
        for _ in range(self.work):
            x = x @ torch.eye(16)
        return torch.nn.functional.gelu(self.layer(x))


def busy(work: int = 0, seed: int = 0) -> nn.Module:
    """A model of one interface whose speed and weights an entry can change."""
    torch.manual_seed(seed)
    return Busy(work)


def slow_to_build(width: int = 8, seconds: float = 4.0) -> nn.Module:
    """Takes its time, so that a test can strike in mid-build."""
    time.sleep(seconds)
    return good(width)


def retrained(seed: int, folder: str) -> nn.Module:
    """A model with other weights for each seed; every judge is disturbed while FOLDER/busy
    exists.
    """
    from freezer.timing.meters import CpuMeter

    if (Path(folder) / "busy").exists():
        CpuMeter.disturbed = lambda self, num_rounds=1: True  # type: ignore[method-assign]
        CpuMeter.single_threaded = lambda self: False  # type: ignore[method-assign]
    return busy(seed=seed)


def random_weights() -> nn.Module:
    """Other weights every time it is called: no candidate can be held against it."""
    torch.manual_seed(time.time_ns() % 2**31)
    return nn.Linear(16, 16)


def raises() -> nn.Module:
    """A factory that raises."""
    raise ValueError("no weights at hand")


def hangs() -> nn.Module:
    """A factory that never returns, and ignores SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)
    return nn.Identity()


class Unexportable(nn.Module):
    """A layer that torch.export does not survive, in one of several ways."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self.end, self.layer = end, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Answer, unless it is exported."""
        if torch.compiler.is_exporting():
            if self.end == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            if self.end == "hang":
                time.sleep(3600)
            raise RuntimeError("not to be exported")
        return torch.nn.functional.gelu(self.layer(x))


def unexportable(end: str, loads: str) -> nn.Module:
    """Such a model; a file counts how often it is loaded."""
    with Path(loads).open("a") as file:
        file.write("loaded\n")
    torch.manual_seed(0)
    return Unexportable(end)
