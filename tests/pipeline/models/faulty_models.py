"""A model whose candidates end the judge: the first one to reach a stage crashes, hangs or eats
memory there, whenever it reaches it.
"""

from __future__ import annotations

import inspect
import itertools
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

STAGES = {
    "opening": "apply_gate",
    "validating": "apply_gate",
    "timing": "time_entrants",
    "sizes": "time_sizes",
}
"""Function of the judge that runs a candidate, by stage."""

FAULTS: dict[str, Any] = {
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "timeout": lambda: time.sleep(3600),
    "memory": lambda: [b"x" * size for size in itertools.repeat(20_000_000)],
}


def strike(faults: dict[str, str], folder: Path, path: Path, *stages: str) -> None:
    """Strike in a stage that runs now, if the candidate is the victim of it, or of no other."""
    name, running = path.parents[1].name, [frame.function for frame in inspect.stack(0)]
    for stage in faults.keys() & stages:
        victims = {file.name: file.read_text() for file in folder.iterdir()}
        is_free = stage in victims or name not in victims.values()
        if is_free and STAGES[stage] in running and victims.get(stage, name) == name:
            (folder / stage).write_text(name)
            FAULTS[faults[stage]]()


def faulty(faults: dict[str, str], folder: str) -> nn.Module:
    """A model for batches; `faults` are by stage, or of the `source` itself."""
    from freezer.runtime.loaders import LOADERS

    if "source" in faults:
        FAULTS[faults["source"]]()
    load, may_strike = LOADERS["torchscript"], partial(strike, faults, Path(folder))

    def loaded(path: Path, *args: Any) -> Any:
        may_strike(path, "opening")
        run = load(path, *args)

        def call(*inputs: Any) -> Any:
            may_strike(path, "validating", "timing", "sizes")
            return run(*inputs)

        return call

    LOADERS["torchscript"] = loaded  # type: ignore[index]
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU())
