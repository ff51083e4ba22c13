"""Outputs whose strides in a capture would differ from eager's."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from tests.support.models import seeded
from tests.support.steps import BATCH, candidate_of, random_inputs, subject_of

X = random_inputs(2, 5, 8)


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
    with torch.no_grad():
        expected = subject.model(X)
    assert candidate.open(subject)(X)["out"].stride() == expected["out"].stride()
