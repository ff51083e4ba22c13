"""Captures: forms of results, strides, state that a call changes, and names to keep."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from freezer.errors import CaptureError
from freezer.freezing.models import Subject, SubjectOptions, prepare
from freezer.freezing.recipes import CaptureName
from freezer.spec import declared_spec
from tests.support.models import Calling, Counter, Layers, Mlp, mlp, seeded
from tests.support.steps import captured_by, random_inputs, subject_of

X = random_inputs(2, 4)


class Running(nn.Module):
    """Keeps running statistics through an operation whose schema does not say that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, training=True)  # type: ignore[arg-type]


class InPlace(nn.Module):
    """Changes a buffer through a view of it."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.last.t().relu_().add_(x.t())
        return self.last * 1


@pytest.mark.parametrize(
    ("model", "x", "mutates"),
    [
        (seeded(Counter), X, ["model.count"]),
        (Running(), X, ["model.mean", "model.var"]),
        (InPlace(), X, ["model.last"]),
        (mlp(), X, []),
        (Calling(lambda x: torch.relu_(x * 2)), X, []),
        (
            Layers(nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4), nn.ReLU(inplace=True)),
            random_inputs(3, 2, 5),
            [],
        ),
    ],
)
def test_export_names_changed_buffers(model: nn.Module, x: Tensor, mutates: list[str]) -> None:
    """Activations in place change none."""
    assert captured_by(subject_of(model, {"x": x}), "export").mutates == mutates


class Remembering(nn.Module):
    """Adds a buffer that grows; its other methods have no @torch.jit.export."""

    def __init__(self) -> None:
        super().__init__()
        self.version = "1.0"
        self.steps = 0
        self.kept: Tensor = nn.Buffer(torch.zeros(4))
        self.inner = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.kept = self.kept + x.mean(0)
        return x + self.kept

    def reset(self) -> None:
        self.steps = 0
        self.kept = torch.zeros(4)

    def scaled(self, factor: int = 2) -> Tensor:
        return self.kept * factor


def kept(*names: str, reset: str | None = None) -> Subject:
    spec = declared_spec({"x": {"shape": [2, 4]}}, {})
    return prepare(
        "model", seeded(Remembering), spec, options=SubjectOptions(preserve=names, reset=reset)
    )


def test_script_keeps_methods_and_attributes() -> None:
    subject = kept("version", "steps", "scaled", "inner.first.in_features", reset="reset")
    captured = captured_by(subject, "script")
    assert captured.preserve == ("version", "steps", "scaled", "inner.first.in_features", "reset")
    program, eager = captured.program, seeded(Remembering)
    assert isinstance(eager, Remembering)
    for _ in range(2):
        assert torch.equal(program(X), eager(X))
    assert (program.version, program.steps) == ("1.0", 2)
    assert torch.equal(program.scaled(3), eager.scaled(3))
    program.reset()
    assert (program.steps, float(program.kept.sum())) == (0, 0)
    assert not any(
        hasattr(function, "_torchscript_modifier") for function in vars(Remembering).values()
    )


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_trace_and_export_cannot_keep_names(capture: CaptureName) -> None:
    with pytest.raises(CaptureError, match="'version', 'reset' must stay") as caught:
        captured_by(kept("version", reset="reset"), capture)
    assert caught.value.code == "CP-PRESERVE"
