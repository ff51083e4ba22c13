"""A whole freeze on another device: `cpu:0`, which computes like the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import freezer
from freezer.errors import JudgeError
from freezer.freezing.candidates import build
from freezer.freezing.judging import judge
from freezer.freezing.models import to_device
from freezer.freezing.packaging import assemble
from freezer.freezing.recipes import RECIPES
from freezer.freezing.target import Target, target_here
from tests.support.models import Counter, Mlp, mlp, seeded
from tests.support.steps import BATCH, HERE, random_inputs, session_of, subject_of

APART = torch.device("cpu", 0)
X = random_inputs(2, 4)


@pytest.fixture
def target() -> Target:
    return replace(target_here(HERE, 1), device=APART)


def test_placed_subject_keeps_its_host() -> None:
    subject = subject_of(mlp(), {"x": X}, {"x": {0: BATCH}})
    moved = to_device(subject, APART)
    assert moved.device == APART
    assert moved.host is moved.on_host is subject
    assert moved.model is not subject.model
    assert to_device(moved, APART) is moved
    assert to_device(moved, torch.device("cpu")) is subject
    assert to_device(subject, torch.device("cpu")) is subject
    assert subject.device == torch.device("cpu")
    assert subject.on_host is subject


@pytest.mark.parametrize(
    ("recipe", "model"), [("torchscript-frozen", Counter), ("torchscript-optimized", Mlp)]
)
def test_freeze_on_another_device(
    recipe: str, model: type[nn.Module], tmp_path: Path, target: Target
) -> None:
    subject = subject_of(seeded(model), {"x": X}, {"x": {0: BATCH}})
    (tmp_path / "candidate").mkdir()
    session = session_of(subject, target)
    candidate = build(session.subject, RECIPES[recipe], target, tmp_path / "candidate")
    judgement = judge(session, [candidate])
    assert judgement.winner is not None, judgement.reason
    assert judgement.reference.float64
    artifact = assemble(session, judgement, dest=tmp_path / "out", provenance={}, failures={})
    torch.testing.assert_close(freezer.load(artifact.folder)(x=X), subject.fresh()(X))


class MakesOnCpu(nn.Module):
    """Returns a CPU tensor on any device."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(2) + x.shape[0]


class Breaks(nn.Module):
    """Adds a CPU tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.zeros(2, 4, device="cpu")


@pytest.mark.parametrize("model", [MakesOnCpu, Breaks])
def test_placed_rejects_models_tied_to_the_cpu(
    model: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    # meta tensors have no bytes
    monkeypatch.setattr("freezer.freezing.models.calls.same_bytes", lambda *_: True)
    subject = subject_of(model(), {"x": X})
    with pytest.raises(JudgeError) as caught:
        to_device(subject, torch.device("meta"))
    assert caught.value.code == "CP-EAGER"
