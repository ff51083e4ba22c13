"""Embedding tables: judges draw few of their rows, so payloads must hold them byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from freezer.artifact import files_of
from tests.support.models import seeded
from tests.support.steps import candidate_of, subject_of


class Lookup(nn.Module):
    """Rows of a table, scaled and projected."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.table(ids) * 4)


@pytest.mark.parametrize(
    "recipe",
    [
        "portable",
        "torchscript-frozen",
        "onnxruntime",
        "openvino",
        pytest.param("inductor-frozen", marks=pytest.mark.slow),
    ],
)
def test_payloads_hold_embedding_tables_unchanged(recipe: str, tmp_path: Path) -> None:
    model = seeded(Lookup)
    table = model.state_dict()["table.weight"].numpy().tobytes()
    ids = torch.arange(500).view(2, 250)
    candidate = candidate_of(subject_of(model, {"ids": ids}), recipe, tmp_path / "made")
    files = [candidate.folder / file.path for file in files_of(candidate.payloads)]
    assert table in b"".join(map(Path.read_bytes, files))
