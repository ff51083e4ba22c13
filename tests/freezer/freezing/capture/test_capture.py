"""Captures: every form of result, constants, and both call styles; the source stays unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freezer.artifact import Payload
from freezer.freezing.models import Subject
from freezer.freezing.recipes import CaptureName
from freezer.runtime.contract import NamedOutput, OpenPayload
from freezer.runtime.frozen_model import FrozenModel
from freezer.runtime.loaders import torchscript_deprecations_silenced
from freezer.runtime.tensors import leaves_of
from tests.support.models import Calling, Counter, mlp, seeded
from tests.support.steps import BATCH, captured_by, random_inputs, subject_of

X = random_inputs(2, 4)


class Running(nn.Module):
    """Keeps running statistics through an operation whose schema does not say that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, training=True)  # type: ignore[arg-type]


@dataclass
class Answer:
    logits: Tensor
    loss: Tensor | None
    states: tuple[Tensor, ...]


def served(subject: Subject, name: CaptureName) -> FrozenModel:
    """The captured program as a FrozenModel, without any lowering."""
    captured = captured_by(subject, name)
    payload = Payload(
        path="",
        digest="",
        size_bytes=0,
        kind="exported",
        num_threads=None,
        convention=captured.convention,
    )
    run = captured.program.module() if name == "export" else captured.program
    return FrozenModel(
        spec=subject.spec,
        outputs=subject.outputs,
        structure=subject.structure,
        payloads=[OpenPayload(payload=payload, run=run)],
    )


@pytest.mark.parametrize("name", ["export", "trace"])
@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: [x, (x + 1, None)], list),
        (lambda x: {"b": x, "a": {"deep": x * 3}, "none": None, "number": 3}, dict),
        (lambda x: Answer(logits=x * 2, loss=None, states=(x, x + 1)), NamedOutput),
    ],
)
def test_captured_model_keeps_the_result_structure(
    name: CaptureName, function: Callable[[Tensor], Any], kind: type
) -> None:
    subject = subject_of(Calling(function), {"x": X}, {"x": {0: BATCH}})
    model = served(subject, name)
    for batch in (1, 3, 4):
        x = random_inputs(batch, 4, seed=batch)
        expected, got = leaves_of(function(x)), model(x)
        assert isinstance(got, kind)
        assert all(
            torch.equal(one, other) for one, other in zip(leaves_of(got), expected, strict=True)
        )


@pytest.mark.parametrize("name", ["export", "trace", "as-is"])
def test_capture_changes_neither_source_nor_sets(name: CaptureName) -> None:
    model: nn.Module = seeded(Counter)
    if name == "as-is":
        with torchscript_deprecations_silenced():
            model = torch.jit.script(model)
    subject = subject_of(model, {"x": X})
    before = [item.cloned() for item in subject.sets]
    captured = captured_by(subject, name)
    captured.program.module()(X) if name == "export" else captured.program(X)
    assert float(model.state_dict()["count"]) == 0
    assert all(
        torch.equal(one["x"], item.tensors["x"])
        for one, item in zip(before, subject.sets, strict=True)
    )


def test_export_names_changed_buffers() -> None:
    captured = captured_by(subject_of(seeded(Counter), {"x": X}), "export")
    assert captured.mutates == ("model.count",)
    captured = captured_by(subject_of(seeded(Running), {"x": X}), "export")
    assert captured.mutates == ("model.mean", "model.var")
    for model in (mlp(), Calling(lambda x: torch.relu_(x * 2))):
        assert captured_by(subject_of(model, {"x": X}), "export").mutates == ()


class InPlace(nn.Module):
    """Changes a buffer through a view of it."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.last.t().relu_().add_(x.t())
        return self.last * 1


def test_activations_in_place_change_no_state() -> None:
    assert captured_by(subject_of(InPlace(), {"x": X}), "export").mutates == ("model.last",)
    layers = nn.Sequential(nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4), nn.ReLU(inplace=True)).eval()
    subject = subject_of(layers, {"input": random_inputs(3, 2, 5)})
    assert captured_by(subject, "export").mutates == ()
