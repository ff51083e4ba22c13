"""Conversion of TorchScript sources to exported programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freezer.freezing.capture import Captured
from freezer.freezing.models import Subject, call_source, prepare
from freezer.runtime.loaders import torchscript_deprecations_silenced
from freezer.runtime.tensors import leaves_of
from freezer.spec import declared_spec
from tests.support.models import TinyConv, mlp, seeded
from tests.support.steps import captured_by, random_inputs

X: dict[str, Any] = {"x": {"shape": ["batch", 4]}}
BATCH: dict[str, Any] = {"batch": {"max": 4}}


def torchscript(model: nn.Module, *tensors: Tensor) -> nn.Module:
    """A TorchScript model: traced if tensors are given, otherwise scripted."""
    with torchscript_deprecations_silenced(), torch.no_grad():
        made: nn.Module = torch.jit.trace(model, tensors) if tensors else torch.jit.script(model)
    return made


def subject(model: nn.Module, inputs: Any = None, dims: Any = None) -> Subject:
    return prepare("model", model, declared_spec(inputs or X, BATCH if dims is None else dims))


def converted(found: Subject) -> Captured:
    return captured_by(found, "convert")


class Nested(nn.Module):
    """Takes tuples, dicts, an optional tensor and a number; returns a dict and a tuple."""

    def forward(
        self,
        x: Tensor,
        state: tuple[Tensor, Tensor],
        options: dict[str, Tensor],
        rate: int = 3,
        bias: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
        y = (x * state[0] + state[1]) * options["gain"] * rate
        if bias is not None:
            y = y + bias
        return {"b": y, "a": y + 1}, (y.reshape(x.shape[0], 2, -1), x)


NESTED: dict[str, Any] = {
    **X,
    "state": {"tuple": [{"shape": ["batch", 4]}, {"shape": ["batch", 4]}]},
    "options": {"dict": {"gain": {"shape": [4]}}},
}


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (
            lambda: torchscript(seeded(TinyConv), random_inputs(2, 3, 16, 16)),
            {"x": {"shape": ["batch", 3, 16, 16]}},
        ),
        (lambda: torchscript(mlp()), [{"shape": ["batch", 4]}]),
        (lambda: torchscript(Nested()), {**NESTED, "rate": {"value": 5}, "bias": {"shape": [4]}}),
    ],
)
def test_converted_program_answers_like_its_source(model: Any, inputs: Any) -> None:
    found = subject(model(), inputs)
    captured = converted(found)
    assert (captured.name, captured.convention) == ("convert", "flat")
    assert "batch from 1 to 4" in captured.guards
    assert captured.warnings == ()
    module = captured.program.module()
    for item in found.sets:
        expected = leaves_of(call_source(found.fresh(), found.spec, item.tensors))
        for one, other in zip(module(*item.tensors.values()), expected, strict=True):
            torch.testing.assert_close(one, other)
