"""Commands that install optional packages."""

from __future__ import annotations

import tomllib
from pathlib import Path

from freezer.errors import LEAST, install_command

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())


def test_versions_are_those_of_the_project() -> None:
    groups = [PROJECT["dependency-groups"]["pipeline"]]
    groups += PROJECT["project"]["optional-dependencies"].values()
    required = {requirement for group in groups for requirement in group}
    assert {f"{name}>={version}" for name, version in LEAST.items()} <= required


def test_what_an_artifact_needs_decides() -> None:
    command = install_command("onnxruntime", "openvino", onnxruntime="1.32")
    assert command == f"pip install 'onnxruntime>=1.32' 'openvino>={LEAST['openvino']}'"
