"""Objects of the C++ compiler are shared by models of one architecture, and by nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from freezer.freezing.candidates import Candidate, build
from freezer.freezing.lowering import objects_kept_in
from freezer.freezing.recipes import RECIPES
from freezer.freezing.target import target_here
from tests.support.steps import HERE, random_inputs, subject_of

X = random_inputs(2, 3, 8, 8)

IN_ANOTHER_PROCESS = """
import sys
from pathlib import Path
from tests.freezer.freezing.lowering.inductor.test_objects import build_one
build_one(0, Path(sys.argv[1]), Path(sys.argv[2]))
"""


def network(seed: int) -> nn.Module:
    """A convolution, a batch norm and an activation that is fused into the convolution."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    return nn.Sequential(layers, nn.ReLU()).eval()


def build_one(seed: int, folder: Path, objects: Path) -> Candidate:
    folder.mkdir()
    subject = subject_of(network(seed), {"input": X})
    with objects_kept_in(objects):
        return build(subject, RECIPES["inductor-frozen"], target_here(HERE, 2), folder)


def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a compiler that writes a line for each object; return the file."""
    folder.mkdir()
    log, script = folder / "log", folder / "g++"
    log.touch()
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *r.cpp*|*l.cpp*) echo >> {log} ;; esac\nexec g++ "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return log


def test_retrained_model_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, objects = compiler(tmp_path / "first", monkeypatch), tmp_path / "objects"
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path / "a"), str(objects)]
    subprocess.run(command, check=True)
    num_compiled = len(log.read_text())
    assert num_compiled == len(list(objects.iterdir())) > 0
    candidate = build_one(1, tmp_path / "b", objects)
    assert len(log.read_text()) == num_compiled
    subject = subject_of(network(1), {"input": X})
    torch.testing.assert_close(
        candidate.open(subject)(input=X), network(1)(X), atol=1e-5, rtol=1e-4
    )


@pytest.mark.slow
def test_damaged_and_foreign_objects_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, objects = compiler(tmp_path / "first", monkeypatch), tmp_path / "objects"
    build_one(1, tmp_path / "a", objects)
    num_compiled = len(log.read_text())
    for stored in objects.iterdir():
        stored.write_bytes(stored.read_bytes()[:-1])
    build_one(1, tmp_path / "b", objects)
    assert len(log.read_text()) == 2 * num_compiled
    other = compiler(tmp_path / "second", monkeypatch)
    build_one(1, tmp_path / "c", objects)
    assert len(other.read_text()) == num_compiled
