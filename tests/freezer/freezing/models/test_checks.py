"""What a source model must be: its weights are there, and all of it is in eval mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import freezer
from freezer.errors import SourceError, SpecError
from freezer.freezing.models.checks import check_mode
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced
from tests.steps import random_inputs, subject_of

X = random_inputs(2, 4)


class KeepsTraining(nn.Module):
    """Keeps its norm in training mode, whatever mode it is put into."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def train(self, mode: bool = True) -> KeepsTraining:
        super().train(mode)
        self.norm.train()
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


def test_lazy_layers_that_were_never_called_are_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(SourceError, match=r"^model: 0\.weight and 1 more are of lazy layers, .*; call the model once") as caught:
        subject_of(model, {"input": X})
    assert caught.value.code == "CP-WEIGHTS-MISSING"
    model(X)
    subject_of(model, {"input": X})


def test_weights_on_the_meta_device_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False, device="meta"))
    with pytest.raises(SourceError, match=r"^model: 1\.weight is on the meta device, without values; load the weights") as caught:
        subject_of(model, {"input": X})
    assert caught.value.code == "CP-WEIGHTS-MISSING"


def test_a_part_in_training_mode_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).eval()
    model[1].train()
    with pytest.raises(SpecError, match=r"^1 is in training mode, within a model in eval mode; call model\.eval\(\)"):
        freezer.freeze(model, [X], out=tmp_path / "out")
    model[2].train()
    with pytest.raises(SpecError, match=r"^1 and 1 more are in training mode"):
        check_mode(model)
    check_mode(model.eval())


def test_what_a_model_keeps_in_training_mode_is_as_it_is_meant() -> None:
    check_mode(KeepsTraining().eval())


def test_torchscript_has_a_mode_or_none() -> None:
    with torchscript_deprecations_silenced():
        scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4)).eval())
        frozen = torch.jit.freeze(scripted)
    assert not hasattr(frozen, "training")
    check_mode(scripted)
    check_mode(frozen)
