"""Readable code and graphs of captured and frozen models."""

from __future__ import annotations

import re
from typing import Any

import pytest

from freezer.freezing.lowering import captured_texts
from freezer.freezing.lowering.lowered import shortened
from tests.support.models_reports import ConvNet
from tests.support.steps import BATCH, captured_by, random_inputs, subject_of

IMAGE = random_inputs(2, 3, 8, 8)


def texts_of(capture: Any, **kwargs: Any) -> dict[str, str]:
    return captured_texts(
        captured_by(subject_of(ConvNet(), {"x": IMAGE}, **kwargs), capture).program
    )


def test_texts_of_an_exported_program() -> None:
    texts = texts_of("export", dims={"x": {0: BATCH}})
    assert "torch.ops.aten.conv2d.default" in texts["captured-code.txt"]
    assert "# File: torch/nn/modules/conv.py:" in texts["captured-code.txt"]
    assert "call_function[target=torch.ops.aten.batch_norm.default]" in texts["captured-graph.txt"]
    assert "BUFFER target='model.features.1.running_mean'" in texts["captured-graph.txt"]
    assert re.search(r"# ranges\n# s\d+: VR\[1, 4\]\n", texts["captured-graph.txt"])
    assert not re.search(r"[# ]/\w+/", "".join(texts.values())), (
        "no folder of the machine that built it"
    )


@pytest.mark.parametrize("capture", ["trace", "script"])
def test_texts_of_torchscript_include_submodules(capture: str) -> None:
    texts = texts_of(capture)
    prefix = "model." if capture == "trace" else ""
    named = {line for line in texts["captured-code.txt"].splitlines() if line.startswith("# ")}
    assert f"# {prefix}features.1, {prefix}features.4, {prefix}features.7" in named, (
        "three batch norms have one code"
    )
    assert texts["captured-graph.txt"].startswith("# forward\ngraph(")
    assert texts["captured-graph.txt"].count("aten::batch_norm(") == 3
    assert not re.search(r"# /", texts["captured-graph.txt"])


def test_source_paths_are_shortened() -> None:
    text = (
        "%1 = aten::relu(%0) #"
        " /opt/venv/lib/python3.12/site-packages/torch/nn/functional.py:12:3\n%2 #"
        " /home/me/model.py:7:0"
    )
    assert shortened(text) == "%1 = aten::relu(%0) # torch/nn/functional.py:12:3\n%2 # model.py:7:0"
    assert (
        shortened("# File: /home/me/model.py:7 in forward, code: x")
        == "# File: model.py:7 in forward, code: x"
    )
