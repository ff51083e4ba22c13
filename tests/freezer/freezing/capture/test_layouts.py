"""Outputs whose strides a capture would give otherwise than eager; weights that a call changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freezer.errors import BuildError, CaptureError
from freezer.freezing.capture.capture import Attempt
from freezer.freezing.capture.convert import ConvertedModule
from freezer.freezing.capture.equivalence import ask_eager
from freezer.freezing.capture.export import export_flat
from freezer.freezing.capture.program import other_layouts
from freezer.freezing.models.subject import Subject
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced
from tests.freezer.models_features import MaxNorm
from tests.models import Calling, seeded
from tests.steps import BATCH, candidate_of, judgement_of, random_inputs, subject_of

X = random_inputs(2, 5, 8)
LAST = torch.channels_last


class Attention(nn.Module):
    """In eval mode eager takes a path of its own, whose result is contiguous; what torch.export captures gives it transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out, weights = self.attention(x, x, x)
        return {"out": out, "weights": weights}


def test_outputs_are_laid_out_as_eager_does(tmp_path: Path) -> None:
    subject = subject_of(seeded(Attention), {"x": X}, {"x": {0: BATCH}})
    candidate = candidate_of(subject, "portable", tmp_path / "candidate")
    assert candidate.capture == "export"
    assert "The program lays output 'out' out as eager does." in candidate.reports["payloads/all.pt2"].notes
    assert judgement_of(subject, [candidate]).verdict == "published"


def exported_twice(second: Callable[[Tensor], Tensor]) -> Subject:
    """A model whose exports lay its output out otherwise than it does itself, so that there is a second; in that, it answers what
    `second` does.
    """
    exports: list[None] = []

    def forward(x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            return x * 2
        exports.append(None)
        return transposed(x * 2 if len(exports) == 1 else second(x))

    return subject_of(Calling(forward), {"x": random_inputs(2, 4)}, {"x": {0: BATCH}})


def transposed(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def warned(x: Tensor) -> Tensor:
    warnings.warn("this is the second", stacklevel=1)
    return x * 2


def refused(x: Tensor) -> Tensor:
    raise ValueError("this is the second")


def narrow(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] < 4 else x + x


def test_the_program_that_is_laid_out_anew_is_checked_as_the_first_was() -> None:
    found = Attempt(exported_twice(warned), None).capture("export")
    assert found.notes == ("The program lays output 'output' out as eager does.",)
    assert [line.partition(" At ")[0] for line in found.warnings] == ["UserWarning: this is the second"], "and it is not raised"
    assert found.program.module()(random_inputs(3, 4))[0].stride() == (4, 1)


@pytest.mark.parametrize(
    ("second", "message", "code"),
    [
        (refused, r"^torch\.export: ValueError: this is the second at test_layouts", "CP-CAPTURE"),
        (narrow, r"^torch\.export: no program takes all declared sizes of batch", "CP-EXPORT-DIMS"),
        (lambda x: x * 3, "^the exported program differs from the model on input set 0", "CP-EXPORT-DIFFERS"),
    ],
)
def test_the_program_that_is_laid_out_anew_is_refused_as_the_first_would_be(second: Any, message: str, code: str) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        Attempt(exported_twice(second), None).capture("export")
    assert caught.value.code == code


def test_a_converted_program_is_laid_out_too() -> None:
    with torchscript_deprecations_silenced():
        source = torch.jit.trace(Calling(lambda x: x * 2), (random_inputs(2, 4),))
    subject = subject_of(source, {"x": random_inputs(2, 4)}, {"x": {0: BATCH}})
    dynamic = {0: torch.export.Dim("batch", min=1, max=4)}
    other = torch.export.export(Calling(lambda x: (transposed(x * 2),)), (random_inputs(2, 4),), dynamic_shapes=[dynamic])
    found = export_flat(lambda: ConvertedModule(other), "convert", subject, None, lambda: ask_eager(subject))
    assert found.notes == ("The program lays output 'output' out as eager does.",)
    assert found.program.module()(random_inputs(3, 4))[0].stride() == (4, 1)


def test_only_layouts_that_have_a_name_are_asked_for() -> None:
    image, turned = random_inputs(2, 3, 4, 4), X.transpose(0, 1)
    assert other_layouts([X, image], [X, image]) == {}
    assert other_layouts([X], [turned.contiguous().transpose(0, 1)]) == {0: torch.contiguous_format}
    assert other_layouts([image, image.to(memory_format=LAST)], [image, image]) == {1: LAST}
    assert other_layouts([turned], [turned.contiguous()]) == {}, "transposed has no name"
    assert other_layouts([X[:0]], [X[:0]]) == {}


def test_a_weight_that_a_call_changes_is_state(tmp_path: Path) -> None:
    subject = subject_of(seeded(MaxNorm), {"ids": torch.arange(10).reshape(2, 5)})
    assert Attempt(subject, None).capture("export").mutates == ("model.table.weight",)
    with pytest.raises(BuildError, match=r"a call changes model\.table\.weight") as caught:
        candidate_of(subject, "inductor-frozen", tmp_path / "candidate")
    assert caught.value.code == "CP-STATE"
