"""Outputs whose strides a capture would give otherwise than eager; weights that a call changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from freezer.capture import Attempt
from freezer.captured import other_layouts
from freezer.errors import BuildError
from tests.freezer.models_features import MaxNorm
from tests.models import seeded
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
