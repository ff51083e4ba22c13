"""TorchScript payloads: what their reports count, and optimization at load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import freezer
from freezer.artifact import Artifact, FreezingReport
from freezer.freezing.recipes import RECIPES
from freezer.runtime.loaders import open_torchscript, torchscript_deprecations_silenced
from freezer.runtime.torch_settings import threads
from tests.conftest import Frozen, frozen
from tests.support.models import Layers, TinyConv, seeded
from tests.support.steps import (
    HERE,
    candidate_of,
    random_inputs,
    subject_of,
)

SETTINGS = RECIPES["torchscript-optimized"].settings
X, ROW = random_inputs(2, 3, 16, 16), random_inputs(2, 4)


@pytest.fixture(scope="module")
def optimized(tmp_path_factory: pytest.TempPathFactory) -> Frozen:
    """A torchscript-optimized artifact of a convnet for batch 1 to 4; read it, never write it."""
    out = tmp_path_factory.mktemp("optimized") / "conv"
    return frozen(
        seeded(TinyConv), X, out, name="conv", recipe="torchscript-optimized", device_class=HERE
    )


def report_of(model: nn.Module, x: Tensor, recipe: str, folder: Path) -> FreezingReport:
    candidate = candidate_of(subject_of(model.eval(), {"x": x}), recipe, folder / recipe)
    (report,) = candidate.reports.values()
    return report


def test_folded_layers_and_constants_are_counted(tmp_path: Path) -> None:
    """Constants are the weight and bias of the convolution, and five tensors of the norm."""
    model = Layers(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout())
    report = report_of(model, X, "torchscript-optimized", tmp_path)
    left = {"aten::_convolution": 1, "aten::relu": 1}
    assert report.ops_before == {**left, "aten::batch_norm": 1, "aten::dropout": 1}
    assert report.ops_after == left
    assert (report.num_constants, report.constants_bytes) == (7, 4 * (81 + 3 + 4 * 3) + 8)
    assert report.constants[0] == "layers.0.weight"
    assert report_of(model, X, "torchscript-exact", tmp_path).ops_after["aten::batch_norm"] == 1


def payload_of(artifact: Artifact) -> Path:
    return artifact.folder / artifact.manifest.payloads[0].path


def test_artifact_contains_the_frozen_module(optimized: Frozen) -> None:
    """Weights are laid out at load, for the threads that serve."""
    with torchscript_deprecations_silenced():
        stored = torch.jit.load(str(payload_of(optimized.artifact)))
    assert not any(name in str(stored.graph) for name in ("mkldnn", "batch_norm"))
    assert optimized.artifact.manifest.payloads[0].num_threads is None
    served: Any = open_torchscript(payload_of(optimized.artifact), SETTINGS)
    assert "mkldnn" in str(served.graph)


@pytest.mark.parametrize("opened_with", [1, 2])
def test_answers_equal_the_source_with_any_thread_count(
    optimized: Frozen, opened_with: int
) -> None:
    with threads(opened_with):
        model = freezer.load(optimized.artifact.folder)
    for num_threads, batch in ((2, 1), (1, 3), (3, 4)):
        x = random_inputs(batch, 3, 16, 16, seed=batch)
        with threads(num_threads):
            for _ in range(3):  # TorchScript's executor specializes on the first calls
                torch.testing.assert_close(
                    model(x), optimized.model(x).detach(), rtol=1e-4, atol=1e-5
                )
            assert torch.get_num_threads() == num_threads
