"""Integers that engines compute otherwise than torch, and random numbers, are refused; all others
are converted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freezer.errors import BuildError
from freezer.freezing.lowering.stable_forms import check_numbers
from tests.support.steps import BATCH, captured_by, subject_of

IDS = torch.arange(12).reshape(2, 6)
X = torch.linspace(-3, 3, 12).reshape(2, 6)


class Function(nn.Module):
    """A function of numbers and integers, which also looks the integers up in a table."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.table, self.function = nn.Embedding(50, 4), function

    def forward(self, x: Tensor, ids: Tensor, count: Tensor) -> Any:
        return self.table(ids), self.function(x, ids), count


class Divided(Function):
    """A function of integers that are bounded, and of some that are not."""

    def forward(self, x: Tensor, ids: Tensor, count: Tensor) -> Any:
        return self.table(ids), self.function(ids, count)


def problem(model: nn.Module, *, in_64_bits: bool) -> str | None:
    dims = {name: {0: BATCH} for name in ("x", "ids", "count")}
    subject = subject_of(model, {"x": X, "ids": IDS, "count": IDS + 1}, dims)
    try:
        check_numbers(captured_by(subject, "export"), in_64_bits=in_64_bits)
    except BuildError as error:
        return error.code
    return None


@pytest.mark.parametrize(
    ("function", "is_refused"),
    [
        (lambda x, ids: (x * 1000).long(), True),
        (lambda x, ids: ids * 2**30, True),
        (lambda x, ids: ids.sum(1) + 7, False),
        (lambda x, ids: (x.sigmoid() * 255).long(), False),
        (lambda x, ids: x.clamp(0, 9).to(torch.int64), False),
        (lambda x, ids: (x > 0).long().cumsum(1), False),
        (lambda x, ids: x.argmax(1), False),
        (lambda x, ids: ids // 4 + ids % 7, False),
    ],
)
def test_64_bits_that_an_engine_lacks_are_refused(
    function: Callable[[Tensor, Tensor], Any], *, is_refused: bool
) -> None:
    refused = problem(Function(function), in_64_bits=False) is not None
    assert refused == is_refused
    assert problem(Function(function), in_64_bits=True) is None


def test_divisions_that_may_raise_are_refused() -> None:
    assert problem(Divided(lambda ids, count: ids // count), in_64_bits=True) == "CP-BUILD"
    assert problem(Divided(lambda ids, count: count % (ids + 1)), in_64_bits=True) is None


def test_random_numbers_are_refused() -> None:
    def dropping(training: bool) -> nn.Module:
        return Function(lambda x, ids: nn.functional.dropout(x, 0.5, training=training))

    assert problem(dropping(True), in_64_bits=True) == "CP-BUILD"
    assert problem(dropping(False), in_64_bits=True) is None
    assert problem(Function(lambda x, ids: x + torch.randn_like(x)), in_64_bits=True)
    assert problem(Function(lambda x, ids: (torch.rand([]), x)[1]), in_64_bits=True) is None


def test_half_precision_inputs_are_taken() -> None:
    subject = subject_of(nn.ReLU(), {"input": X.half()})
    check_numbers(captured_by(subject, "export"), in_64_bits=False)
