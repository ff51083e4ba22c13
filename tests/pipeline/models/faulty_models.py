"""A good model whose candidates end the judge: the first one to reach a stage crashes, hangs or
eats memory there, now and whenever it reaches it again.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

STAGES = {
    "opening": ("apply_gate",),
    "validating": ("apply_gate",),
    "timing": ("time_entrants",),
    "sizes": ("time_sizes",),
}
"""Functions of the judge that run a candidate, by stage."""


def strike(fault: str) -> None:
    """Let this process crash, hang or use more memory than it may."""
    eaten = []
    while fault == "memory":
        eaten.append(b"x" * 20_000_000)
    while fault == "timeout":
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGSEGV)


def now_in(names: tuple[str, ...]) -> bool:
    """Whether one of the functions is running."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name not in names:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


class Faults:
    """Faults by stage, and their victims, of which FOLDER has the names."""

    def __init__(self, faults: Mapping[str, str], folder: str) -> None:
        self._faults, self._folder = faults, Path(folder)

    def may_strike(self, stage: str, path: Path) -> None:
        """Strike if this is the stage's victim, or it has none and this is no other stage's."""
        name = path.parents[1].name
        if stage not in self._faults or not now_in(STAGES[stage]):
            return
        victims = {file.name: file.read_text() for file in self._folder.iterdir()}
        if stage not in victims and name not in victims.values():
            victims[stage] = name
            (self._folder / stage).write_text(name)
        if victims.get(stage) == name:
            strike(self._faults[stage])

    def around(self, load: Any) -> Any:
        """A loader whose payloads may strike."""

        def loaded(path: Path, *args: Any) -> Any:
            self.may_strike("opening", path)
            run = load(path, *args)

            def call(*inputs: Any, **named: Any) -> Any:
                for stage in ("validating", "timing", "sizes"):
                    self.may_strike(stage, path)
                return run(*inputs, **named)

            return call

        return loaded


def faulty(faults: dict[str, str], folder: str = "") -> nn.Module:
    """A model for batches; `faults` by stage strike its candidates, or as `source` itself."""
    from freezer.runtime.loaders import LOADERS

    if "source" in faults:
        strike(faults["source"])
    if faults and folder:
        LOADERS["torchscript"] = Faults(faults, folder).around(LOADERS["torchscript"])  # type: ignore[index]
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16))
