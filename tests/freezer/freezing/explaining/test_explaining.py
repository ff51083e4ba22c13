"""Explanations of drift: planted faults, the fold of a batch norm, and what users get of them."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freezer.artifact.explanation import Explanation
from freezer.codec import decode, encode
from freezer.freezing.candidates import build, repaired_recipe
from freezer.freezing.drift import run_reference
from freezer.freezing.explaining import GraphReference, explain_recipe
from freezer.freezing.judging import judge
from freezer.freezing.recipes import RECIPES
from tests.support.commands import finished
from tests.support.models import Layers, seeded
from tests.support.planted_faults import FAULTS, Fault, explanation_of, near_constant, pixels
from tests.support.steps import (
    artifact_of,
    quickly,
    random_inputs,
    session_of,
    subject_of,
    target_of,
)

_QUICK = [
    next(fault for fault in FAULTS if words in str(fault))
    for words in (
        "tabular: linear: wrong constant",
        "listening: tanh: reduced precision",
        "segmenting: group_norm: wrong epsilon",
        "squash: wrong kernel",
        "segmenting: cat: swapped inputs Concat",
        "convolutional: batch_norm: wrong constant Convolution",
    )
]


@pytest.mark.parametrize("fault", _QUICK, ids=str)
def test_a_planted_fault_is_located(fault: Fault) -> None:
    explanation = explanation_of(fault)
    assert explanation.fails
    assert explanation.guilty is not None
    assert explanation.guilty.node == fault.node
    assert explanation.num_builds <= 4
    assert explanation.guilty.local.excess > 1
    before = [score for score in explanation.stages if score.stage != explanation.stage]
    assert all(score.error.excess <= 1 for score in before)


@pytest.mark.slow
def test_planted_faults_are_located() -> None:
    found = Counter[bool]()
    times = []
    for fault in FAULTS:
        explanation = explanation_of(fault)
        guilty = explanation.guilty
        found[explanation.fails and guilty is not None and guilty.node == fault.node] += 1
        times.append(explanation.wall_s)
        assert explanation.num_builds <= 4
    assert len(FAULTS) >= 50
    assert len({fault.model for fault in FAULTS}) >= 8
    assert found[False] <= 2
    assert sorted(times)[len(times) // 2] < 60


def _explained(recipe: str, reproduction: Path | None = None) -> Explanation:
    subject = subject_of(near_constant(), {"x": pixels()})
    call = run_reference(subject).singles[0]
    target = target_of(subject, recipe, torch.get_num_threads())
    return explain_recipe(subject, recipe, target, call, reproduction=reproduction)


@pytest.mark.parametrize("recipe", ["openvino", "inductor-frozen"])
def test_a_bad_fold_is_located(recipe: str) -> None:
    explanation = _explained(recipe)
    assert explanation.fails
    assert explanation.guilty is not None
    assert explanation.guilty.node == "batch_norm"
    assert explanation.guilty.module == "norm"
    assert "planted_faults.py" in str(explanation.guilty.line)
    assert explanation.repair == "apart"
    record = decode(Explanation, encode(explanation), origin="a test")
    assert record == explanation
    assert "batch_norm" in record.svg()


def test_without_the_fold_it_is_published(tmp_path: Path) -> None:
    given = {"x": pixels()}, tmp_path / "out", "openvino"
    result = quickly(near_constant(), *given, samples=[{"x": pixels(2)}])
    assert result.verdict == "published"
    manifest = artifact_of(result).manifest
    assert manifest.recipe.settings["node_repairs"] == {"batch_norm": "apart"}
    assert any("batch_norm" in warning for warning in manifest.freezing.warnings)


def test_a_rejection_names_the_place(tmp_path: Path) -> None:
    given = {"x": pixels()}, tmp_path / "out"
    result: Any = quickly(near_constant(), *given, samples=[{"x": pixels(2)}])
    assert result.verdict == "rejected"
    assert "'optimize_numerics'" in result.reason
    explanation = result.judgement.trials[0].explanation
    assert explanation.stage == "optimize_numerics"
    [text] = result.evidence.rglob("explained.txt")
    assert text.read_text() == explanation.text()


@pytest.mark.parametrize(
    "recipe",
    ["openvino", "onnxruntime", pytest.param("inductor-frozen", marks=pytest.mark.slow)],
)
def test_the_reproduction_fails_alone(recipe: str, tmp_path: Path) -> None:
    """The file is not named as an engine, which it would shadow."""
    file = tmp_path / "reproduce.py"
    _explained(recipe, file)
    text = file.read_text()
    assert len(text.splitlines()) <= 60
    assert "freezer" not in text
    done = finished(sys.executable, file)
    assert done.returncode == 1
    assert "AssertionError" in done.stderr


def test_a_wrong_capture_is_located() -> None:
    class Branching(nn.Module):
        """Takes another branch where torch exports it."""

        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if torch.compiler.is_exporting() else x

    subject = subject_of(Layers(Branching(), nn.Linear(4, 4)), {"x": torch.ones(2, 4)})
    call = run_reference(subject).singles[0]
    target = target_of(subject, "openvino", torch.get_num_threads())
    explanation: Any = explain_recipe(subject, "openvino", target, call)
    assert explanation.stage == "capture"
    assert explanation.guilty.module == "layers.0"


def test_a_node_in_float64_is_served(tmp_path: Path) -> None:
    subject = subject_of(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), {"input": torch.ones(2, 8)})
    target = target_of(subject, "onnxruntime", torch.get_num_threads())
    recipe = repaired_recipe(RECIPES["onnxruntime"], {"linear": "float64"})
    candidate = build(subject, recipe, target, tmp_path)
    assert judge(session_of(subject, target), [candidate]).verdict == "published"
    assert candidate.settings["node_repairs"] == {"linear": "float64"}
    [graph] = (tmp_path / "evidence").glob("all-graph.txt")
    assert "double" in graph.read_text()


class Weighted(nn.Module):
    """Two layers, of which one hardly matters."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.small(x) * 1e-3 + self.large(x)
        return result


def test_effects_follow_errors_to_the_outputs() -> None:
    x = random_inputs(2, 4)
    source = GraphReference(torch.export.export(seeded(Weighted), (x,)), [x])
    noisy = {name: source.eager[name] + 0.01 for name in ("linear", "linear_1")}
    effects = source.effects(noisy)
    assert effects["linear_1"] == pytest.approx(1000 * effects["linear"], rel=0.01)
