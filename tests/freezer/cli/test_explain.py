"""The command `coldpress explain`."""

from __future__ import annotations

from pathlib import Path

from tests.freezer.cli.conftest import Run


def test_the_command_explains_a_source(coldpress: Run, tmp_path: Path) -> None:
    source = "python:tests.support.planted_faults:near_constant"
    inputs = '{"x": {"shape": [2, 3, 12, 12]}}'
    arguments = (source, "--inputs", inputs, "--recipe", "openvino", "--out", tmp_path / "out")
    code, out, err = coldpress("explain", *arguments)
    assert code == 0, err
    assert "batch_norm" in out
    assert (tmp_path / "out" / "openvino.svg").read_text().startswith("<svg")
    assert (tmp_path / "out" / "openvino.py").is_file()
