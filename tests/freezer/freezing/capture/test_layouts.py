"""Outputs whose strides in a capture would differ from eager's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freezer.errors import CaptureError
from freezer.freezing.capture.capture import Attempt
from freezer.freezing.capture.program import other_layouts
from freezer.freezing.models.subject import Subject
from tests.models import Calling, seeded
from tests.steps import BATCH, candidate_of, judgement_of, random_inputs, subject_of

X = random_inputs(2, 5, 8)
LAST = torch.channels_last


class Attention(nn.Module):
    """Eager's fast path gives a contiguous result, an exported program a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out, weights = self.attention(x, x, x)
        return {"out": out, "weights": weights}


def test_outputs_get_eagers_layout(tmp_path: Path) -> None:
    subject = subject_of(seeded(Attention), {"x": X}, {"x": {0: BATCH}})
    candidate = candidate_of(subject, "portable", tmp_path / "candidate")
    assert candidate.capture == "export"
    assert "The program gives output 'out' eager's layout." in candidate.reports["payloads/all.pt2"].notes
    assert judgement_of(subject, [candidate]).verdict == "published"


def exported_twice(second: Callable[[Tensor], Tensor]) -> Subject:
    """A model whose first export has another output layout, which causes a second export; there it answers what `second` does."""
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


def narrow(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] < 4 else x + x


def test_second_export_is_checked() -> None:
    found = Attempt(exported_twice(warned), None).capture("export")
    assert found.notes == ("The program gives output 'output' eager's layout.",)
    assert [line.partition(" At ")[0] for line in found.warnings] == ["UserWarning: this is the second"]
    assert found.program.module()(random_inputs(3, 4))[0].stride() == (4, 1)


@pytest.mark.parametrize(
    ("second", "message", "code"),
    [
        (narrow, r"^torch\.export: no program takes all declared sizes of batch", "CP-EXPORT-DIMS"),
        (lambda x: x * 3, "^the exported program differs from the model on input set 0", "CP-EXPORT-DIFFERS"),
    ],
)
def test_second_export_may_be_refused(second: Any, message: str, code: str) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        Attempt(exported_twice(second), None).capture("export")
    assert caught.value.code == code


def test_only_memory_formats_are_requested() -> None:
    image, turned = random_inputs(2, 3, 4, 4), X.transpose(0, 1)
    assert other_layouts([X, image], [X, image]) == {}
    assert other_layouts([X], [turned.contiguous().transpose(0, 1)]) == {0: torch.contiguous_format}
    assert other_layouts([image, image.to(memory_format=LAST)], [image, image]) == {1: LAST}
    assert other_layouts([turned], [turned.contiguous()]) == {}
    assert other_layouts([X[:0]], [X[:0]]) == {}
