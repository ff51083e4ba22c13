"""Exports: declared and accepted sizes, guards, and strict tracing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freezer.errors import CaptureError, ContractError
from freezer.freezing.candidates import Candidate, build
from freezer.freezing.capture import Captured
from freezer.freezing.models import Subject, prepare
from freezer.freezing.recipes import RECIPES
from freezer.freezing.target import target_here
from freezer.spec import Dim, declared_spec
from tests.support.models import Calling
from tests.support.steps import candidate_of, captured_by, random_inputs, subject_of

BATCH = {"batch": {"max": 16}}


def sharpened(x: Tensor) -> Tensor:
    """[batch, 3, height, width] to the same; both sizes are multiples of 4."""
    coarse = nn.functional.avg_pool2d(x, 4)
    return x - coarse.repeat_interleave(4, 2).repeat_interleave(4, 3)


def subject(model: nn.Module | Callable[[Tensor], Any], dims: Any = None) -> Subject:
    module = model if isinstance(model, nn.Module) else Calling(model)
    return prepare(
        "model", module.eval(), declared_spec({"x": {"shape": ["batch", 4]}}, dims or BATCH)
    )


def export(model: nn.Module | Callable[[Tensor], Any], dims: Any = None) -> Captured:
    return captured_by(subject(model, dims), "export")


def halved(x: Tensor) -> Tensor:
    return x.view(-1, 2, 4)


def even(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] % 2 == 0 else x * 3


@pytest.mark.parametrize(
    ("model", "lowest", "needs", "remedy"),
    [
        (even, 1, "(batch % 2) == 0", "declare multiple_of: 2 for batch"),
        (lambda x: x * 2 if x.shape[0] < 8 else x, 1, "batch <= 7", "declare max: 7 for batch"),
        (lambda x: x[2:], 3, "((-2) + batch) != 1", "declare other bounds"),
    ],
)
def test_error_says_how_to_declare_sizes(model: Any, lowest: int, needs: str, remedy: str) -> None:
    with pytest.raises(CaptureError) as caught:
        export(model, {"batch": {"min": lowest, "max": 16}})
    assert needs in str(caught.value)
    assert f"; {remedy}" in str(caught.value)
    assert caught.value.code == "CP-EXPORT-DIMS"


def test_silently_narrowed_program_is_refused() -> None:
    declared = {"min": 2, "max": 16, "multiple_of": 2}
    with pytest.raises(CaptureError) as caught:
        export(halved, {"batch": declared})
    assert caught.value.code == "CP-EXPORT-DIMS"
    assert "batch=2 (batch // 2 != 1)" in str(caught.value)
    guards = export(halved, {"batch": {**declared, "min": 4}}).guards
    assert "(batch % (batch // 2)) == 0" in guards


def test_wrong_answer_at_size_one_is_found() -> None:
    def at_least_two(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] >= 2 else x

    with pytest.raises(CaptureError, match=r"\(batch=1\)") as caught:
        export(at_least_two)
    assert caught.value.code == "CP-CAPTURE-DIFFERS"
    assert export(at_least_two, {"batch": {"min": 2, "max": 16}}).guards == ("batch from 2 to 16",)


def to_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2)


def by_type(x: Tensor) -> Tensor:
    return x * 2 if type(x) is Tensor else x * 3


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        (to_numpy, r"torch\.export: .* at test_export\.py"),
        (by_type, "the exported program differs from the model"),
    ],
)
def test_strict_tracing_is_tried_second(model: Any, refused: str, tmp_path: Path) -> None:
    recipe = replace(RECIPES["portable"], ways=RECIPES["portable"].ways[:2])
    candidate = build(
        subject(model), recipe, target_here("portable", torch.get_num_threads()), tmp_path
    )
    assert candidate.capture == "export-strict"
    assert re.match(refused, candidate.tried[0]["outcome"])
    served = candidate.open(subject(model))
    for batch in (1, 3, 16):
        x = random_inputs(batch, 4)
        assert torch.equal(served(x), x * 2)


def test_declared_multiples_are_served_and_enforced(tmp_path: Path) -> None:
    dims = {
        "batch": {"max": 2},
        "height": {"min": 16, "max": 64, "multiple_of": 4},
        "width": {"min": 16, "max": 32, "multiple_of": 4},
    }
    spec = declared_spec({"x": {"shape": ["batch", 3, "height", "width"]}}, dims)
    found = prepare("model", Calling(sharpened).eval(), spec)
    candidate = candidate_of(found, "portable", tmp_path / "candidate")
    assert candidate.capture == "export"
    assert candidate.payloads[0].dims[1] == Dim(name="height", min=16, max=64, multiple_of=4)
    assert Candidate.read(candidate.folder).payloads == candidate.payloads
    assert next(iter(candidate.reports.values())).guards[:3] == (
        "batch from 1 to 2",
        "height from 16 to 64 in multiples of 4",
        "width from 16 to 32 in multiples of 4",
    )
    served = candidate.open(found)
    for sizes in ((1, 16, 16), (2, 20, 28), (1, 64, 32)):
        x = random_inputs(sizes[0], 3, *sizes[1:])
        torch.testing.assert_close(served(x), found.model(x))
    with pytest.raises(
        ContractError,
        match=r"got shape \[1, 3, 18, 16\], expected .* height from 16 to 64 in multiples of 4",
    ):
        served(random_inputs(1, 3, 18, 16))


def test_size_made_constant_is_named() -> None:
    """An LSTM over a varying length, which torch.export unrolls."""
    dims = {"x": {0: Dim(name="length", min=2, max=9)}}
    subject = subject_of(Calling(nn.LSTM(4, 8, proj_size=3)), {"x": random_inputs(5, 2, 4)}, dims)
    with pytest.raises(CaptureError) as caught:
        captured_by(subject, "export")
    assert caught.value.code == "CP-EXPORT-DIMS"
    assert ("length == " in str(caught.value), "mark_dynamic" in str(caught.value)) == (True, False)
