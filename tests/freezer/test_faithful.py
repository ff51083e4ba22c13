"""Traces and scripts held against the model: what passes, what does not, and that it says where."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freezer.capture import Attempt
from freezer.errors import CaptureError
from freezer.faithful import ask_eager
from freezer.recipes import CaptureName
from freezer.subject import Subject
from tests.lines import place_of
from tests.models import (
    AttributeCounter,
    Branching,
    Calling,
    Counter,
    Halving,
    Random,
    ReassignedCounter,
    seeded,
)
from tests.steps import BATCH, captured_by, random_inputs, subject_of

X = random_inputs(2, 4)


class Sized(nn.Module):
    """Is right for the batch size of the example alone when it is traced."""

    def forward(self, x: Tensor) -> Tensor:
        return x * int(x.shape[0])


class Nudging(nn.Module):
    """Beside the lowest value that a float holds, as masks do, a branch changes the others by a hundredth."""

    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(x < 0, torch.finfo(torch.float32).min) + (0.0 if float(x.sum()) > 0 else 0.01)


class Sluggish(nn.Module):
    """A stateful model whose first answers are all right in a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls == 1 else -x


class ParameterCounter(nn.Module):
    """Counts in a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x + self.count


def subject(model: nn.Module, *, dynamic: bool = False) -> Subject:
    return subject_of(model, {"x": X}, {"x": {0: BATCH}} if dynamic else {})


def captured(model: nn.Module, name: CaptureName, *, dynamic: bool = False) -> Any:
    return captured_by(subject(model, dynamic=dynamic), name)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_trace_that_lost_a_branch_is_an_error_that_names_the_set_the_output_and_the_line(dynamic: bool) -> None:
    place = re.escape(place_of(Branching.forward, "x.sum()"))
    sizes = r" \(batch=\d\)" if dynamic else ""
    message = (
        rf"^the trace differs from the model on input set \d{sizes}: output 'output' is off by up to \d\.\d+, "
        rf"since a trace keeps what its example gave at {place}$"
    )
    with pytest.raises(CaptureError, match=message) as caught:
        captured(Branching(), "trace", dynamic=dynamic)
    assert caught.value.code == "CP-TRACE-DIFFERS"


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (Halving(), "output 'output' is off by up to"),
        (Nudging(), "output 'output' is off by up to"),
        (Calling(lambda x: torch.zeros(int(x.abs().sum()))), r"output 'output' has shape \[\d+\], expected \[\d+\]"),
        (Calling(lambda x: (x, x.half() if float(x.sum()) > 0 else x)), r"output '1' has dtype float\d+, expected float\d+"),
        (Calling(lambda x: (x * 10).int() + int(x.sum() > 0)), r"output 'output' differs in 8 of 8 places"),
        (Calling(lambda x: x > 0 if float(x.sum()) > 0 else x < 0), r"output 'output' differs in 8 of 8 places"),
        (Calling(lambda x: x / (0.0 if float(x.sum()) > 0 else 1.0)), "output 'output' has NaN or Inf in other places"),
        (Calling(lambda x: torch.complex(x, x if float(x.sum()) > 0 else -x)), "output 'output' is off by up to"),
        (Calling(lambda x: x.reshape(8, int(x.sum() > 0))[:, :1].mean() if float(x.sum()) > 0 else x.sum()), "output 'output' "),
    ],
)
def test_whatever_differs_is_found(model: nn.Module, problem: str) -> None:
    with pytest.raises(CaptureError, match=problem) as caught:
        captured(model, "trace")
    assert caught.value.code == "CP-TRACE-DIFFERS"


def test_a_trace_that_does_not_run_on_other_inputs_says_what_happened_last() -> None:
    model = Calling(lambda x: torch.zeros(int(x.abs().max()) + 1)[x.abs().long()])
    small = subject_of(model, {"x": X * 0.01})
    with pytest.raises(CaptureError, match=r"on input set \d: RuntimeError: index \d is out of bounds"):
        captured_by(small, "trace")


def test_every_point_is_tried() -> None:
    assert captured(Sized(), "trace").name == "trace", "right for the one size that there is"
    with pytest.raises(CaptureError, match=r"on input set \d \(batch=(2|4)\): output 'output' is off by"):
        captured(Sized(), "trace", dynamic=True)


def test_a_point_is_tried_alone() -> None:
    fixed = captured_by(subject(Sized(), dynamic=True), "trace", {"batch": 4})
    x = random_inputs(4, 4)
    assert torch.equal(fixed.program(x)[0], x * 4)


@pytest.mark.parametrize("model", [Counter, ParameterCounter])
def test_a_trace_that_keeps_state_is_right_and_stays_in_its_initial_state(model: type[nn.Module]) -> None:
    program = captured(seeded(model), "trace").program
    assert [float((program(X)[0] - X).mean()) for _ in range(3)] == pytest.approx([1, 2, 3])


@pytest.mark.parametrize("model", [AttributeCounter, ReassignedCounter, Sluggish])
def test_state_that_a_trace_loses_shows_in_the_second_call(model: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match=r"on the second call with input set 0: output 'output' is off by"):
        captured(seeded(model), "trace")
    program = captured(seeded(model), "script").program
    eager = seeded(model)
    assert all(torch.equal(program(X), eager(X)) for _ in range(3))


def test_a_model_that_is_random_is_not_held_and_the_evidence_says_so() -> None:
    assert not ask_eager(subject(Random())).deterministic
    found = captured(Random(), "trace")
    assert found.warnings == ("the trace is not held against the model, which answers the same inputs differently",)


def test_rounding_is_no_difference() -> None:
    class Split(nn.Module):
        """Rounds otherwise when it is traced."""

        def forward(self, x: Tensor) -> Tensor:
            return (x * 0.1 + 0.2) if torch.jit.is_tracing() else (x + 2.0) * 0.1  # type: ignore[attr-defined,no-untyped-call]

    assert captured(Split(), "trace").name == "trace"


def test_an_output_that_is_not_a_number_may_stay_so() -> None:
    assert captured(Calling(lambda x: (x / 0, torch.sqrt(-x.abs()), torch.zeros(0, 3))), "trace").name == "trace"


@pytest.mark.parametrize("name", ["trace", "script"])
def test_an_eager_model_that_fails_on_some_sizes_is_told_from_a_wrong_capture(name: CaptureName) -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.ones(2, 4)

    with pytest.raises(
        CaptureError, match=r"^the eager model does not run on input set \d \(batch=4\): RuntimeError: The size"
    ) as caught:
        captured(Fixed(), name, dynamic=True)
    assert caught.value.code == "CP-CAPTURE"


def test_the_model_is_asked_once_for_each_set() -> None:
    calls: list[int] = []

    def counting(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x * 2

    found = subject(Calling(counting), dynamic=True)
    calls.clear()
    attempt = Attempt(found, None)
    assert attempt.eager is attempt.eager
    assert len(calls) == len(found.sets) + 1, "the last to see that it answers the same twice"
