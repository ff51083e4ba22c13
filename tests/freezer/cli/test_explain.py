"""The command `coldpress explain`."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from tests.freezer.cli.conftest import Run
from tests.support.planted_faults import pixels


def test_the_command_explains_a_source(coldpress: Run, tmp_path: Path) -> None:
    source = "python:tests.support.planted_faults:near_constant"
    samples = tmp_path / "samples.safetensors"
    save_file({"x": pixels()}, samples)
    arguments = (source, "--inputs", samples, "--recipe", "openvino", "--out", tmp_path / "out")
    code, out, err = coldpress("explain", *arguments)
    assert code == 0, err
    assert "batch_norm" in out
    assert (tmp_path / "out" / "openvino.svg").read_text().startswith("<svg")
    assert (tmp_path / "out" / "reproduce-openvino.py").is_file()
