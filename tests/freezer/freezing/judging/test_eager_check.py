"""Checks of the eager model without a freeze: `coldpress freeze --debug`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from freezer.cli.app import app
from freezer.errors import UsageError
from freezer.freezing.judging import debug
from tests.support.commands import finished
from tests.support.models import Calling, mlp
from tests.support.steps import BATCH, random_inputs, subject_of

X = random_inputs(2, 4)

SCRIPTED = """
import torch
from torch import nn

@torch.jit.script
def gate(x: torch.Tensor) -> torch.Tensor:
    if not torch.jit.is_scripting():
        print("python runs", list(x.shape))
    return x * 2

class Model(nn.Module):
    def forward(self, x):
        return gate(x)

def make():
    return Model().eval()
"""


def test_figures_of_every_output_and_set() -> None:
    subject = subject_of(mlp(), {"x": X}, {"x": {0: BATCH}})
    found = debug(subject)
    assert len(found.figures) == len(subject.sets)
    for figure, item in zip(found.figures, subject.sets, strict=True):
        expected = mlp()(item.tensors["x"]).detach()
        assert figure.shape == tuple(expected.shape)
        assert (figure.low, figure.high) == (float(expected.min()), float(expected.max()))
        assert figure.num_not_finite == 0
        assert figure.relative_error is not None
        assert 0 < figure.relative_error < 1e-5
    assert found.facts == (
        "a call changes nothing that later calls see",
        "the same inputs give the same outputs",
        "runs in float64, which drift is measured against",
    )
    assert found.warnings == ()


def test_nonfinite_elements_are_counted() -> None:
    def infinite(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, torch.full_like(x, float("inf")))

    found = debug(subject_of(Calling(infinite), {"x": X}))
    assert all(figure.num_not_finite > 0 for figure in found.figures)
    assert all(figure.high is not None and figure.high < 100 for figure in found.figures)


INPUTS = '{"x": {"shape": [2, 3]}}'


def test_command_runs_scripted_functions_as_python(tmp_path: Path) -> None:
    """In a fresh process: TorchScript is switched off before torch is imported."""
    (tmp_path / "scripted_model.py").write_text(SCRIPTED)
    before = set(tmp_path.iterdir())
    given = ("freeze", "--debug", "python:scripted_model:make", "--inputs", INPUTS)
    done = finished(sys.executable, "-m", "freezer.cli", *given, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "python runs [2, 3]" in done.stdout
    assert "float32 [2, 3]" in done.stdout
    assert "nothing was frozen and nothing was written" in done.stdout
    assert {path for path in tmp_path.iterdir() if path.name != "__pycache__"} == before


def test_failed_freeze_writes_its_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inputs = ("--inputs", '{"x": {"shape": ["rows", 3]}}', "--dims", '{"rows": {"max": 4}}')
    command = ["freeze", "python:tests.support.models:listing", *inputs]
    done = CliRunner().invoke(app, [*command, "--out", "out", "--recipe", "torchscript-frozen"])
    assert done.exit_code == 1
    [folder] = (tmp_path / "out.evidence").iterdir()
    assert "evidence and full errors: out.evidence" in done.output
    text = (folder / "errors.txt").read_text()
    assert "torchscript-frozen" in text
    assert "Traceback (most recent call last)" in text
    assert "tests/support/models.py" in text
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, UsageError), done.exception
