"""Commands that end: their output, and commands that must succeed."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support.raylets import ROOT

Done = subprocess.CompletedProcess[str]

OPEN_RAW = """
import sys
import torch
torch.set_num_threads(int(sys.argv[2]))
runner = torch._C._aoti.AOTIModelPackageLoader(sys.argv[1], "model", False, 1, -1)
(output,) = runner.run([torch.ones(*map(int, sys.argv[3:]))])
print("answered", tuple(output.shape), flush=True)
"""
"""Program that opens an Inductor payload without the loader: PAYLOAD THREADS SIZE..."""


def finished(
    *command: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 550,
) -> Done:
    """Run a command to its end, and keep its output."""
    return subprocess.run(
        [str(part) for part in command],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def output(*command: object, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Run a command in a folder, and return its output; the test fails if the command does."""
    done = finished(*command, env=env, cwd=cwd)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
