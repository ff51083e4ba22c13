"""Ranges of integer inputs, found from the tables that a model indexes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freezer.errors import SpecError
from freezer.freezing.models import SubjectOptions, prepare
from freezer.spec import declared_spec


class Tables(nn.Module):
    """Indexes a table with each input, in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(50, 4), nn.Embedding(2, 4)
        self.bag = nn.EmbeddingBag(30, 4)
        self.rows = nn.Parameter(torch.ones(20, 4))
        self.columns: Tensor = nn.Buffer(torch.ones(4, 11))

    def forward(
        self, ids: Tensor, kinds: Tensor, bag: Tensor, rows: Tensor, columns: Tensor, both: Tensor
    ) -> Tensor:
        part = torch.cat([ids.to(torch.int64), ids.to(torch.int64)], 1)[:, 1:].contiguous()
        out: Tensor = self.words(part).mean(1) + self.words(both) + self.bag(bag)
        out = out + self.kinds(kinds.long().unsqueeze(0)[0].clone())
        out = out + self.rows[rows] + self.rows.half()[both].float()
        out = out + self.columns.index_select(1, columns).t()
        return out + self.columns.t().gather(0, columns.view(-1, 1).expand(-1, 4))


def inputs() -> dict[str, Any]:
    wide = {"shape": ["batch", 3], "dtype": "int32"}
    narrow = {"shape": ["batch"], "dtype": "int64"}
    return {
        "ids": wide,
        "kinds": {**narrow, "dtype": "uint8"},
        "bag": wide,
        "rows": narrow,
        "columns": narrow,
        "both": narrow,
    }


BATCH = {"batch": {"max": 4}}
FOUND = {
    "ids": (0, 49),
    "kinds": (0, 1),
    "bag": (0, 29),
    "rows": (0, 19),
    "columns": (0, 10),
    "both": (0, 19),
}


def test_shortest_table_bounds_each_input() -> None:
    subject = prepare("tables", Tables().eval(), declared_spec(inputs(), BATCH))
    assert {tensor.name: tensor.range for tensor in subject.spec.tensors} == FOUND
    for item in subject.sets:
        for name, (low, high) in FOUND.items():
            assert low <= int(item.tensors[name].min())
            assert int(item.tensors[name].max()) <= high
    words = torch.cat([item.tensors["ids"].flatten() for item in subject.sets])
    assert words.unique().numel() > 20


class Function(nn.Module):
    """An embedding of 10 rows, indexed by a function of the ids."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.table, self.function = nn.Embedding(10, 4), function

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.table(self.function(ids))
        return out


def ids(**fields: Any) -> dict[str, Any]:
    return {"ids": {"shape": ["batch", 6], "dtype": "int64", **fields}}


FOLLOWED: list[Callable[[Tensor], Tensor]] = [
    lambda ids: torch.stack([ids, ids.where(ids > 0, 3)]).unbind(0)[1],
    lambda ids: ids.masked_fill(ids == 0, 1).float().to(torch.int32),
    lambda ids: ids.split([2, 4], 1)[1].transpose(0, 1).repeat(2, 2),
]


@pytest.mark.parametrize("function", FOLLOWED)
def test_views_casts_and_copies_are_followed(function: Callable[[Tensor], Tensor]) -> None:
    subject = prepare("m", Function(function).eval(), declared_spec(ids(), BATCH))
    assert subject.spec.tensors[0].range == (0, 9)


@pytest.mark.parametrize("function", [lambda ids: ids % 10, lambda ids: ids.clone().clamp_(0, 9)])
def test_arithmetic_needs_a_declared_range(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(
        SpecError,
        match=(
            r"input 'ids': an integer input needs `range: \[low, high\]`.* or samples; .* none of"
            r" its tables"
        ),
    ):
        prepare("m", Function(function).eval(), declared_spec(ids(), BATCH))


def test_samples_alone_need_no_range() -> None:
    model, spec = Function(lambda ids: ids).eval(), declared_spec(ids(), BATCH)
    samples = [{"ids": torch.full((2, 6), 4)}]
    assert prepare("m", model, spec, samples).spec.tensors[0].range is None
    assert prepare("m", model, spec, samples, SubjectOptions(fill_up=True)).spec.tensors[
        0
    ].range == (0, 9)
