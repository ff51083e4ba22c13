"""Checks of source models: weights have values, and all parts are in eval mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import freezer
from freezer.errors import SourceError, SpecError
from freezer.freezing.models import check_mode
from freezer.runtime.loaders import torchscript_deprecations_silenced
from tests.support.steps import random_inputs, subject_of

X = random_inputs(2, 4)


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.LazyLinear(4)), nn.Sequential(nn.Linear(4, 4, device="meta"))],
)
def test_missing_weights_are_rejected(model: nn.Module) -> None:
    with pytest.raises(SourceError, match=r"^model: 0\.weight") as caught:
        subject_of(model, {"input": X})
    assert caught.value.code == "CP-WEIGHTS-MISSING"


def test_part_in_training_mode_is_rejected(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).eval()
    model[1].train()
    with pytest.raises(SpecError, match=r"^1 is in training mode"):
        freezer.freeze(model, [X], out=tmp_path / "out")
    check_mode(model.eval())


def test_torchscript_modes_are_accepted() -> None:
    with torchscript_deprecations_silenced():
        scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4)).eval())
        frozen = torch.jit.freeze(scripted)
    assert not hasattr(frozen, "training")
    check_mode(scripted)
    check_mode(frozen)
