"""`coldpress freeze` of models that cannot be captured, on busy machines, and interrupted."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from freezer.cli.app import app
from freezer.errors import UsageError
from tests.support.commands import invoked


def test_failed_freeze_writes_its_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inputs = ("--inputs", '{"x": {"shape": ["rows", 3]}}', "--dims", '{"rows": {"max": 4}}')
    command = ["freeze", "python:tests.support.models:listing", *inputs]
    done = invoked(app, *command, "--out", "out", "--recipe", "torchscript-frozen")
    assert done.exit_code == 1
    [folder] = (tmp_path / "out.evidence").iterdir()
    assert "evidence and full errors: out.evidence" in done.output
    text = (folder / "errors.txt").read_text()
    assert "torchscript-frozen" in text
    assert "tests/support/models.py" in text
    done = invoked(app, *command)
    assert isinstance(done.exception, UsageError)


def test_disturbed_freeze_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("freezer.timing.meters.CpuMeter.disturbed", lambda meter, rounds: True)
    inputs = ("--inputs", '{"x": {"shape": [2, 4]}}')
    command = ["freeze", "python:tests.support.models:mlp", *inputs, "--out", "out"]
    done = invoked(app, *command, "--recipe", "torchscript-frozen")
    assert done.exit_code == 1
    assert "coldpress freeze --resume out" in done.output
    assert (tmp_path / "out" / "manifest.json").is_file()
    with caplog.at_level(logging.INFO, "coldpress"):
        done = invoked(app, "freeze", "--resume", "out", "--accept-noise")
    assert "comparing outputs" in caplog.text
    assert "building torchscript-frozen" not in caplog.text
    assert done.output.startswith(("published", "unstable", "kept-eager"))
    done = invoked(app, "freeze", "--resume", "other")
    assert isinstance(done.exception, UsageError)


SLOW = """
import time
from tests.support.commands import invoked

def model(stubborn):
    print("loading", flush=True)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        if stubborn:
            time.sleep(60)
        raise
"""


@pytest.mark.parametrize(("number", "stubborn"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_signals_stop_a_freeze(number: signal.Signals, stubborn: bool, tmp_path: Path) -> None:
    """A second signal ends a process that does not stop."""
    (tmp_path / "slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "freezer.cli", "freeze", "python:slow:model", "--out", "out"]
    arguments = [
        "--inputs",
        '{"x": {"shape": [1, 3]}}',
        "--args",
        json.dumps({"stubborn": stubborn}),
    ]
    with subprocess.Popen(
        [*command, *arguments], cwd=tmp_path, stdout=-1, stderr=-1, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(number)
        process.stderr.readline()
        assert process.stderr.readline().startswith("stopping; ")
        if stubborn:
            process.send_signal(number)
        process.wait(10)
    assert (process.returncode, (tmp_path / "out").exists()) == (130, False)
