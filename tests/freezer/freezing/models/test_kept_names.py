"""Names to preserve and the reset method are checked before any work starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freezer.errors import SpecError
from freezer.freezing.models import Subject, SubjectOptions, example_spec, prepare
from freezer.runtime.loaders import torchscript_deprecations_silenced
from tests.support.models import seeded
from tests.support.models_state import Constant, InPlace, Versioned
from tests.support.steps import candidate_of, random_inputs

X = random_inputs(2, 3, 8, 8)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 3

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def subject_with(model: nn.Module, x: Tensor, **kwargs: Any) -> Subject:
    spec, example = example_spec({"x": x}, {})
    return prepare("model", model, spec, [example], SubjectOptions(fill_up=True, **kwargs))


def as_given(model: nn.Module, *, scripted: bool) -> nn.Module:
    if not scripted:
        return model
    with torchscript_deprecations_silenced():
        script: nn.Module = torch.jit.script(model)
    return script


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
    assert (subject.preserve, subject.reset, subject.kept_names) == (
        ("count", "reset"),
        "reset",
        ("count", "reset"),
    )
    assert subject_with(
        as_given(seeded(Constant), scripted=scripted), X, preserve=["rate"]
    ).kept_names == ("rate",)


class Tied(nn.Module):
    """One submodule under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Scaled()
        self.decoder = self.encoder
        self.register_module("spare", None)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.encoder(x))
        return out


@pytest.mark.parametrize("scripted", [False, True])
def test_shared_submodule_keeps_both_names(scripted: bool, tmp_path: Path) -> None:
    subject = subject_with(
        as_given(seeded(Tied), scripted=scripted),
        random_inputs(2, 4),
        preserve=["decoder.scale", "encoder.scale"],
    )
    model = candidate_of(subject, "torchscript-frozen", tmp_path / "candidate").open(subject)
    assert (model.decoder.scale, model.encoder.scale) == (3, 3)
    assert torch.equal(model(random_inputs(2, 4)), random_inputs(2, 4) * 3 * 3)


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


def test_prepare_rejects_other_types() -> None:
    spec, _ = example_spec({"x": X}, {})
    with pytest.raises(SpecError, match=r"got a function, expected an nn\.Module"):
        prepare("model", lambda x: x, spec)  # type: ignore[arg-type]
