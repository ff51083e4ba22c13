"""Checks before any work starts: names to preserve, the reset method, weights, and modes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import freezer
from freezer.errors import SourceError, SpecError
from freezer.freezing.models import Subject, SubjectOptions, check_mode, example_spec, prepare
from freezer.runtime.loaders import torchscript_deprecations_silenced
from tests.support.models import scripted_module, seeded
from tests.support.models_state import Constant, InPlace, Versioned
from tests.support.steps import random_inputs, subject_of

X = random_inputs(2, 3, 8, 8)


def subject_with(model: nn.Module, x: Tensor, **kwargs: Any) -> Subject:
    spec, example = example_spec({"x": x}, {})
    return prepare("model", model, spec, [example], SubjectOptions(fill_up=True, **kwargs))


def as_given(model: nn.Module, *, scripted: bool) -> nn.Module:
    return scripted_module(model) if scripted else model


@pytest.mark.parametrize("scripted", [False, True])
def test_existing_names_are_accepted(scripted: bool) -> None:
    names = (
        "version",
        "offset",
        "sub.version",
        "holder.part.scale",
        "encode",
        "conv.weight",
        "norm.running_mean",
    )
    subject = subject_with(as_given(seeded(Versioned), scripted=scripted), X, preserve=names)
    assert subject.kept_names == names
    counting = as_given(seeded(InPlace), scripted=scripted)
    subject = subject_with(
        counting, random_inputs(2, 4), preserve=["count", "reset"], reset="reset"
    )
    assert (subject.reset, subject.kept_names) == ("reset", ("count", "reset"))
    assert subject_with(
        as_given(seeded(Constant), scripted=scripted), X, preserve=["rate"]
    ).kept_names == ("rate",)


@pytest.mark.parametrize("scripted", [False, True])
@pytest.mark.parametrize(
    "name", ["encoed", "subb.version", "sub", "sub.bump", "forward", "state_dict"]
)
def test_names_that_cannot_be_kept_are_rejected(name: str, scripted: bool) -> None:
    with pytest.raises(SpecError) as caught:
        subject_with(as_given(seeded(Versioned), scripted=scripted), X, preserve=["version", name])
    assert caught.value.code == "CP-PRESERVE"


@pytest.mark.parametrize("scripted", [False, True])
@pytest.mark.parametrize("name", ["rest", "sub.bump", "version"])
def test_wrong_reset_method_is_rejected(name: str, scripted: bool) -> None:
    """A missing method, one of a submodule, and an attribute."""
    model = as_given(seeded(Versioned), scripted=scripted)
    with pytest.raises(SpecError, match="reset: ") as caught:
        subject_with(model, X, reset=name)
    assert caught.value.code == "CP-RESET"


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.LazyLinear(4)), nn.Sequential(nn.Linear(4, 4, device="meta"))],
)
def test_missing_weights_are_rejected(model: nn.Module) -> None:
    with pytest.raises(SourceError, match=r"^model: 0\.weight") as caught:
        subject_of(model, {"input": random_inputs(2, 4)})
    assert caught.value.code == "CP-WEIGHTS-MISSING"


def test_part_in_training_mode_is_rejected(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).eval()
    model[1].train()
    with pytest.raises(SpecError, match=r"^1 is in training mode"):
        freezer.freeze(model, [random_inputs(2, 4)], out=tmp_path / "out")
    check_mode(model.eval())


def test_torchscript_modes_are_accepted() -> None:
    with torchscript_deprecations_silenced():
        scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4)).eval())
        frozen = torch.jit.freeze(scripted)
    assert not hasattr(frozen, "training")
    check_mode(scripted)
    check_mode(frozen)
