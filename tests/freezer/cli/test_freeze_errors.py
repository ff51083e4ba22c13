"""`coldpress freeze` of models that cannot be loaded or captured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LISTING = """
import torch
from torch import nn

class Listing(nn.Module):
    def forward(self, x):
        return torch.tensor(sorted(x.flatten().tolist()))

def listing():
    return Listing().eval()
"""


def freeze(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "freezer.cli", "freeze", *arguments]
    command += ["--inputs", '{"x": {"shape": [2, 3]}}']
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, timeout=120
    )


def test_failed_freeze_writes_its_errors(tmp_path: Path) -> None:
    (tmp_path / "listing_model.py").write_text(LISTING)
    done = freeze(
        tmp_path, "python:listing_model:listing", "--out", "out", "--recipe", "torchscript-frozen"
    )
    assert done.returncode == 1
    [folder] = (tmp_path / "out.evidence").iterdir()
    assert "evidence and full errors: out.evidence" in done.stdout
    assert done.stdout.count("torchscript-frozen: ") == 1, "printed once"
    text = (folder / "errors.txt").read_text()
    assert "torchscript-frozen" in text
    assert "Traceback (most recent call last)" in text
    assert "listing_model.py" in text
    done = freeze(tmp_path, "python:listing_model:missing", "--out", "out")
    assert (done.returncode, "full error: out.evidence/errors.txt" in done.stderr) == (
        1,
        True,
    ), done.stderr
    assert (
        "Traceback (most recent call last)"
        in (tmp_path / "out.evidence" / "errors.txt").read_text()
    )
    done = freeze(tmp_path, "python:listing_model:listing")
    assert done.returncode == 2
    assert "--out" in done.stderr
