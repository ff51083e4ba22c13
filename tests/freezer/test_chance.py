"""Candidates that answer the same for ever where their model draws by chance."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from freezer.chance import NUM_MORE_CALLS, PROBLEM, baked_in
from tests.models import Calling
from tests.steps import candidate_of, judgement_of, random_inputs, subject_of

X = random_inputs(2, 4)
CALLS = {"made": 0}


def count_in_a_global(x: Tensor) -> Tensor:
    CALLS["made"] += 1
    return x * CALLS["made"]


def of_python(x: Tensor) -> Tensor:
    return x * (random.random() + 1)


def of_torch(x: Tensor) -> Tensor:
    return x * (torch.rand(()) + 1)


def dropped(x: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.5)


@pytest.mark.parametrize("function", [of_python, count_in_a_global])
def test_what_was_drawn_while_capturing_is_not_published(function: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    subject = subject_of(Calling(function), {"x": X})
    judgement = judgement_of(subject, [candidate_of(subject, "portable", tmp_path / "candidate")])
    assert judgement.verdict == "rejected"
    assert judgement.reason == f"portable: {PROBLEM}"


@pytest.mark.parametrize("recipe", ["torchscript-frozen", "portable"])
@pytest.mark.parametrize("function", [of_torch, dropped])
def test_what_is_drawn_in_every_call_is_published(function: Callable[[Tensor], Tensor], recipe: str, tmp_path: Path) -> None:
    subject = subject_of(Calling(function), {"x": X})
    judgement = judgement_of(subject, [candidate_of(subject, recipe, tmp_path / "candidate")])
    assert judgement.verdict == "published", judgement.reason


def test_rounding_is_no_chance() -> None:
    eager = [[X], [X * (1 + 1e-5)]]
    assert baked_in(eager, [[X], [X]], lambda: [X]) is None
    assert baked_in([[X], [X * 1.1]], [[X], [X]], lambda: [X]) == PROBLEM


def test_a_coin_may_fall_the_same_way_a_few_times() -> None:
    coins = [torch.tensor(0), torch.tensor(1)]
    throws = iter([0] * (NUM_MORE_CALLS - 1) + [1])
    assert baked_in([[coins[0]], [coins[1]]], [[coins[0]], [coins[0]]], lambda: [coins[next(throws)]]) is None
    assert baked_in([[coins[0]], [coins[1]]], [[coins[0]], [coins[0]]], lambda: [coins[0]]) == PROBLEM


def test_answers_that_are_no_numbers_are_compared_too() -> None:
    nan = torch.tensor([torch.nan, 1.0])
    assert baked_in([[nan], [nan]], [[nan], [nan]], lambda: [nan]) is None
    assert baked_in([[nan], [nan * 2]], [[nan], [nan]], lambda: [nan]) == PROBLEM
