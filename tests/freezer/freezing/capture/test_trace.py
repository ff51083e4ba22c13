"""Traces: refused ones, those kept with a note, and those that read sizes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from freezer.errors import CaptureError
from freezer.freezing.capture import Attempt, trace
from freezer.freezing.models import Subject
from freezer.spec import Dim
from tests.support.lines import place_of
from tests.support.models import Branching, Calling, Halving, Stateful, seeded
from tests.support.steps import BATCH, candidate_of, captured_by, random_inputs, subject_of

X = random_inputs(2, 4)


def subject(model: nn.Module, *, dynamic: bool = False) -> Subject:
    return subject_of(model, {"x": X}, {"x": {0: BATCH}} if dynamic else {})


def as_numpy(x: Tensor) -> Tensor:
    return x * float(np.asarray(x).sum())


def num_positive(x: Tensor) -> Tensor:
    positive = x[x > 0]
    return positive * 2 if positive.shape[0] > 3 else positive


@pytest.mark.parametrize(
    ("model", "part"),
    [
        (Branching(), "x.sum()"),
        (Halving(), "while"),
        (Stateful(), "self.count) > 3"),
        (Calling(lambda x: x * x.sum().item()), ""),
        (Calling(as_numpy), "asarray"),
        (Calling(num_positive), "shape[0]"),
    ],
)
def test_trace_refuses_models_that_read_values(model: Any, part: str) -> None:
    with pytest.raises(CaptureError) as caught:
        captured_by(subject(model, dynamic=True), "trace")
    assert caught.value.code == "CP-TRACE-VALUES"
    read_by = model.function if isinstance(model, Calling) else model.forward
    assert place_of(read_by, part) in str(caught.value)


def test_values_read_only_at_other_sizes_are_found() -> None:
    def large(x: Tensor) -> Tensor:
        if x.shape[0] > 2:
            x = x * 1
            if bool(x.abs().max() > 1000):
                x = x * 0
        return x

    with pytest.raises(CaptureError, match=re.escape(place_of(large, "max() > 1000"))) as caught:
        captured_by(subject(Calling(large), dynamic=True), "trace")
    assert caught.value.code == "CP-TRACE-VALUES"


# Sizes that Python reads

SEQ = Dim(name="seq", min=4, max=64)


class Factor(nn.Module):
    """Multiplies by 2 at sizes from 20 to 40, of which the least, the middle and the most
    are none.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x * (2.0 if 20 <= x.shape[1] <= 40 else 1.0)


class OddPad(nn.Module):
    """Pads odd lengths."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] % 2 == 1:
            x = pad(x, (0, 1))
        return x[:, 0::2] - x[:, 1::2]


@pytest.mark.parametrize("model", [Factor, OddPad])
def test_candidate_is_right_at_every_declared_size(model: type[nn.Module], tmp_path: Path) -> None:
    eager = seeded(model)
    found = subject_of(eager, {"x": random_inputs(2, 8)}, {"x": {1: SEQ}})
    candidate = candidate_of(found, "portable", tmp_path / "portable")
    assert candidate.capture == "script"
    frozen = candidate.open(found)
    for size in SEQ.sizes:
        x = random_inputs(2, size)
        torch.testing.assert_close(frozen(x), eager(x))


def checking(x: Tensor, *_: Tensor) -> Tensor:
    """Reads a size without consequence; TorchScript does not take *args."""
    if x.shape[1] > 100:
        raise ValueError("too long")
    return x * 2


def at_one_size(x: Tensor, *_: Tensor) -> Tensor:
    return x * (2 if x.shape[1] == 23 else 1)


def at_one_combination(x: Tensor, *_: Tensor) -> Tensor:
    return x * (2 if x.shape[0] * x.shape[1] == 33 else 1)


def at_one_stride(x: Tensor, *_: Tensor) -> Tensor:
    return x * (2 if x.stride(0) == 23 else 1)


def at_random(x: Tensor, *_: Tensor) -> Tensor:
    return x + torch.rand_like(x) if x.shape[1] < 60 else x


def varying(function: Callable[..., Tensor]) -> Subject:
    return subject_of(Calling(function), {"x": random_inputs(2, 8)}, {"x": {0: BATCH, 1: SEQ}})


def proven_trace(function: Callable[..., Tensor]) -> Attempt:
    """An attempt whose plain trace was refused for the sizes that Python reads."""
    attempt = Attempt(varying(function), None)
    assert "no trace was refused" in str(attempt.unfit("trace-sizes"))
    with pytest.raises(
        CaptureError, match=r"for all sizes; torch\.jit\.script is tried first"
    ) as caught:
        attempt.capture("trace")
    assert caught.value.code == "CP-TRACE-SIZES"
    return attempt


def test_harmless_read_is_compared_at_every_size() -> None:
    captured = proven_trace(checking).capture("trace-sizes")
    assert "at 244 sizes the answers match" in captured.notes[0]
    assert place_of(checking, "if") in captured.notes[0]
    assert "TracerWarning" in captured.warnings[0]


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (at_one_size, r"batch=\d, seq=23"),
        (at_one_stride, r"batch=\d, seq=23"),
        (at_one_combination, r"batch=(1, seq=33|3, seq=11)"),
    ],
)
def test_one_wrong_size_is_found(function: Callable[..., Tensor], sizes: str) -> None:
    with pytest.raises(CaptureError, match=f"on {sizes}: output 'output' is off by"):
        proven_trace(function).capture("trace-sizes")


def test_unproven_trace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = [proven_trace(at_random), proven_trace(checking)]
    monkeypatch.setattr(trace, "SIZES_LIMIT_S", -1)
    for attempt in attempts:
        with pytest.raises(CaptureError) as caught:
            attempt.capture("trace-sizes")
        assert caught.value.code == "CP-TRACE-SIZES"


def test_one_size_needs_no_proof() -> None:
    assert captured_by(varying(checking), "trace", {"batch": 1, "seq": 4}).name == "trace"
    assert captured_by(subject(Calling(checking)), "trace").name == "trace"
