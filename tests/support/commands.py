"""Commands that must succeed."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.raylets import ROOT


def output(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command in a folder, and return its output; the test fails if the command does."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
