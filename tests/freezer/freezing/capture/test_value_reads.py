"""Values that Python reads while a model is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from freezer.freezing.capture.value_reads import INPUTS, OF_SIZES, STATE, values_read
from freezer.runtime.loaders import torchscript_deprecations_silenced
from tests.support.lines import place_of
from tests.support.models import Calling, Counter, Stateful, TinyConv, seeded
from tests.support.steps import random_inputs

X = random_inputs(2, 4)


def trace(model: nn.Module, tensors: Sequence[Tensor]) -> None:
    with torch.no_grad(), torchscript_deprecations_silenced():
        torch.jit.trace(model, tuple(tensors), check_trace=False)


def reads(model: nn.Module, *tensors: Tensor) -> dict[str, list[str]]:
    return values_read(lambda: model.eval(), trace, tensors or (X,))


def branch(x: Tensor) -> Tensor:
    return x * 2 if bool(x.sum() > 0) else x


def number(x: Tensor) -> Tensor:
    return x * x.sum().item()


def as_numpy(x: Tensor) -> Tensor:
    return x * float(np.asarray(x).sum())


def num_positive(x: Tensor) -> Tensor:
    positive = x[x > 0]
    return positive * 2 if positive.shape[0] > 3 else positive


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (branch, "if bool"),
        (number, "item()"),
        (as_numpy, "asarray"),
        (num_positive, "shape[0]"),
    ],
)
def test_reading_inputs_is_noted_with_the_line(
    function: Callable[[Tensor], Any], part: str
) -> None:
    assert reads(Calling(function)) == {INPUTS: [place_of(function, part)]}


def two_ways(x: Tensor) -> Tensor:
    if bool(x.sum() > 0) and not torch.equal(x, x * 2):
        return x * 2
    return x * 3


with torchscript_deprecations_silenced():
    scripted: Any = torch.jit.script(two_ways)


def traced_sizes(x: Tensor) -> Tensor:
    return (
        x.reshape(x.shape[0] * 2, -1) * x.numel()
        + torch.zeros(x.shape[0] * 2, 1)
        + torch.tensor(0.5)
    )


def number_of_size(x: Tensor) -> Tensor:
    return x * torch.tensor([x.shape[0]])


def rows_by_index(x: Tensor) -> Tensor:
    rows = x[x.abs().long().clamp(0, 1)[:, 0]]
    return rows.reshape(int(rows.shape[0]), 4)


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (lambda x: x if x.shape[0] > 100 else -x, "x if x.shape[0]"),
        (lambda x: x if x.size(1) % 2 else -x, "x if x.size(1)"),
        (number_of_size, "tensor(["),
        (rows_by_index, "int("),
        (lambda x: x * x.stride(0), "stride"),
    ],
)
def test_reading_sizes_is_noted_with_the_line(function: Callable[[Tensor], Any], part: str) -> None:
    found = reads(Calling(function))
    assert list(found) == [OF_SIZES]
    assert part in found[OF_SIZES][0]


@pytest.mark.parametrize(
    "function",
    [
        traced_sizes,
        scripted,
        lambda x: torch.where(x > 0, x, -x).masked_fill(x > 1, 0.0),
        lambda x: x[x > 0] * 2,
        lambda x: torch.arange(x.abs().max().long() + 1) + torch.zeros(x.abs().max().long() + 1),
        lambda x: x + int(torch.ones(3).sum()) + torch.tensor([1.0, 2, 3, 4]),
        lambda x: x + float(torch.zeros_like(x).sum()),
        lambda x: (x, print(f"{x}"))[0],
    ],
)
def test_what_a_trace_follows_is_not_noted(function: Callable[[Tensor], Any]) -> None:
    assert not reads(Calling(function))


def test_changing_state_differs_from_constants() -> None:
    assert reads(Stateful()) == {STATE: [place_of(Stateful.forward, "self.count) > 3")]}
    assert not reads(Counter())
    assert not reads(seeded(TinyConv), random_inputs(2, 3, 16, 16))
