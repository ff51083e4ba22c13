"""Importing OpenVINO: without telemetry, in one process with ONNX Runtime and torch, and without
the package.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.steps import python

IMPORT = """
import sys, warnings
warnings.simplefilter("error")
from freezer.runtime.native import import_openvino
before = sys.modules.get("openvino_telemetry")
openvino = import_openvino("a test needs OpenVINO")
from openvino.tools.ovc import telemetry_utils
assert telemetry_utils.tm.__name__.endswith("telemetry_stub"), telemetry_utils.tm
assert "openvino_telemetry" not in sys.modules
"""


BOTH = """
import sys
from dataclasses import replace
import torch
from freezer.freezing.freeze import freeze
from tests.support.steps import QUICK_OPTIONS
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()).eval()
options = replace(QUICK_OPTIONS, recipes=["onnxruntime", "openvino"])
result = freeze(model, [torch.randn(2, 3, 8, 8)], out=sys.argv[1], options=options)
passed = [trial for trial in result.judgement.trials if not trial.problem]
print(result.verdict, result.failures, sorted(trial.candidate.recipe for trial in passed))
"""


def test_import_is_silent_and_reports_to_nobody(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    assert python(IMPORT, env={**os.environ, "HOME": str(tmp_path)}) == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_process_that_uses_all_engines_ends_normally(tmp_path: Path) -> None:
    for package in ("openvino", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    assert (
        python(BOTH, tmp_path / "out", timeout_s=300)
        == "published {} ['onnxruntime', 'openvino']\n"
    )
