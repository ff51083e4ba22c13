"""Traces and scripts compared with the model, and the error for a difference."""

from __future__ import annotations

from collections.abc import Callable
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
    Counter,
    Random,
    ReassignedCounter,
    seeded,
)
from tests.support.steps import BATCH, captured_by, random_inputs, subject_of

X = random_inputs(2, 4)


class Sized(nn.Module):
    """A trace is right only for the batch size of its example."""

    def forward(self, x: Tensor) -> Tensor:
        return x * int(x.shape[0])


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


def test_trace_for_one_size_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"\(batch=\d\): output 'output'") as caught:
        captured(Sized(), "trace", dynamic=True)
    assert caught.value.code == "CP-CAPTURE-DIFFERS"


def differing(right: Callable[[Tensor], Any], traced: Callable[[Tensor], Any]) -> nn.Module:
    """A model that gives other answers while it is traced."""
    return Calling(lambda x: traced(x) if torch.jit.is_tracing() else right(x))  # type: ignore[attr-defined,no-untyped-call]


@pytest.mark.parametrize(
    ("right", "traced"),
    [
        (lambda x: x, lambda x: x * 2),
        (nudging, lambda x: nudging(x) + 0.01),
        (lambda x: x, lambda x: x[:1]),
        (lambda x: (x, x), lambda x: (x, x.half())),
        (lambda x: x.int(), lambda x: x.int() + 1),
        (lambda x: x, lambda x: x / 0),
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


def test_trace_keeps_state_from_its_initial_state() -> None:
    program = captured(seeded(Counter), "trace").program
    assert [float((program(X)[0] - X).mean()) for _ in range(3)] == pytest.approx([1, 2, 3])


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
    found = captured(Random(), "trace")
    assert found.warnings == (
        "the trace was not compared with the model, whose answers to the same inputs differ",
    )


def test_rounding_is_accepted() -> None:
    class Split(nn.Module):
        """Rounds differently when it is traced."""

        def forward(self, x: Tensor) -> Tensor:
            return (x * 0.1 + 0.2) if torch.jit.is_tracing() else (x + 2.0) * 0.1  # type: ignore[attr-defined,no-untyped-call]

    assert captured(Split(), "trace").name == "trace"


@pytest.mark.parametrize("name", ["trace", "script"])
def test_failing_eager_model_is_reported(name: CaptureName) -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.ones(2, 4)

    with pytest.raises(CaptureError, match=r"eager .* \(batch=4\)") as caught:
        captured(Fixed(), name, dynamic=True)
    assert caught.value.code == "CP-CAPTURE"
