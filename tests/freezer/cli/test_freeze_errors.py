"""`coldpress freeze` of models that cannot be captured, and without `--out`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from freezer.cli.app import app


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
    assert done.exit_code == 2
    assert "--out" in done.output
