"""Traces and scripts compared with the model, and the error for a difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freezer.errors import CaptureError
from freezer.freezing.capture.equivalence import run_eager
from freezer.freezing.models import Subject
from freezer.freezing.recipes import CaptureName
from tests.support.models import (
    AttributeCounter,
    Calling,
    Random,
    ReassignedCounter,
    seeded,
)
from tests.support.steps import BATCH, captured_by, random_inputs, subject_of

X = random_inputs(2, 4)


def nudging(x: Tensor) -> Tensor:
    """Masks with the lowest float; a difference of 0.01 must still show."""
    return x.masked_fill(x < 0, torch.finfo(torch.float32).min)


class Sluggish(nn.Module):
    """A stateful model whose trace is right in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls == 1 else -x


def subject(model: nn.Module, *, dynamic: bool = False) -> Subject:
    return subject_of(model, {"x": X}, {"x": {0: BATCH}} if dynamic else {})


def captured(model: nn.Module, name: CaptureName, *, dynamic: bool = False) -> Any:
    return captured_by(subject(model, dynamic=dynamic), name)


def differing(right: Callable[[Tensor], Any], traced: Callable[[Tensor], Any]) -> nn.Module:
    """A model that gives other answers while it is traced."""
    return Calling(lambda x: traced(x) if torch.jit.is_tracing() else right(x))  # type: ignore[attr-defined,no-untyped-call]


@pytest.mark.parametrize(
    ("right", "traced"),
    [
        (lambda x: x, lambda x: x * 2),
        (nudging, lambda x: nudging(x) + 0.01),
        (lambda x: (x, x), lambda x: (x, x.half())),
        (lambda x: x.int(), lambda x: x.int() + 1),
        (lambda x: torch.complex(x, x), lambda x: torch.complex(x, -x)),
        (lambda x: (x, x), lambda x: (x,)),
    ],
)
def test_every_difference_is_found(
    right: Callable[[Tensor], Any], traced: Callable[[Tensor], Any]
) -> None:
    with pytest.raises(CaptureError) as caught:
        captured(differing(right, traced), "trace")
    assert caught.value.code == "CP-CAPTURE-DIFFERS"


@pytest.mark.parametrize("model", [AttributeCounter, ReassignedCounter, Sluggish])
def test_lost_state_shows_in_the_second_call(model: type[nn.Module]) -> None:
    with pytest.raises(
        CaptureError, match=r"on the second call with input set 0: output 'output' is off by"
    ):
        captured(seeded(model), "trace")
    program = captured(seeded(model), "script").program
    eager = seeded(model)
    assert all(torch.equal(program(X), eager(X)) for _ in range(3))


def test_random_model_is_not_compared() -> None:
    assert not run_eager(subject(Random())).deterministic
    assert captured(Random(), "trace").warnings == (
        "the trace was not compared with the model, whose answers to the same inputs differ",
    )


def test_rounding_is_accepted() -> None:
    class Split(nn.Module):
        """Rounds differently when it is traced."""

        def forward(self, x: Tensor) -> Tensor:
            return (x * 0.1 + 0.2) if torch.jit.is_tracing() else (x + 2.0) * 0.1  # type: ignore[attr-defined,no-untyped-call]

    assert captured(Split(), "trace").name == "trace"


class Approximate(nn.Module):
    """GELU by tanh, but exact in captures: as layers of transformers are on GPUs."""

    def forward(self, x: Tensor) -> Tensor:
        exporting = torch.compiler.is_exporting()
        return nn.functional.gelu(x, approximate="none" if exporting else "tanh")


def test_a_program_may_be_more_exact_than_a_gpu() -> None:
    on_gpu, on_host = subject(Approximate()), subject(Calling(nn.GELU()))
    program = captured_by(replace(on_gpu, host=on_host), "export")
    assert "agrees with the model on the CPU" in program.warnings[-1]
    with pytest.raises(CaptureError, match=r"differs from the model on input set 0"):
        captured_by(replace(on_gpu, host=on_gpu), "export")
