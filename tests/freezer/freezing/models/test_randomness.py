"""Candidates with constant answers where their model's are random."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from freezer.freezing.models import baked_in
from freezer.freezing.models.calls import NUM_MORE_CALLS, PROBLEM
from tests.support.models import Calling
from tests.support.steps import candidate_of, judgement_of, random_inputs, subject_of

X = random_inputs(2, 4)
CALLS = {"made": 0}


@pytest.fixture(autouse=True)
def _same_draws_in_every_run() -> None:
    """Fix the seeds: the assertions hold for nearly all draws."""
    torch.manual_seed(0)
    random.seed(0)


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
def test_baked_in_values_are_rejected(function: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    subject = subject_of(Calling(function), {"x": X})
    judgement = judgement_of(subject, [candidate_of(subject, "portable", tmp_path / "candidate")])
    assert judgement.verdict == "rejected"
    assert judgement.reason == f"portable: {PROBLEM}"


@pytest.mark.parametrize(
    ("recipe", "function"), [("torchscript-frozen", of_torch), ("portable", dropped)]
)
def test_random_models_are_published(
    function: Callable[[Tensor], Tensor], recipe: str, tmp_path: Path
) -> None:
    subject = subject_of(Calling(function), {"x": X})
    judgement = judgement_of(subject, [candidate_of(subject, recipe, tmp_path / "candidate")])
    assert judgement.verdict == "published", judgement.reason


def test_rounding_is_not_randomness() -> None:
    eager = [[X], [X * (1 + 1e-5)]]
    assert baked_in(eager, [[X], [X]], lambda: [X]) is None
    assert baked_in([[X], [X * 1.1]], [[X], [X]], lambda: [X]) == PROBLEM


def test_repeated_values_may_be_chance() -> None:
    coins = [torch.tensor(0), torch.tensor(1)]
    throws = iter([0] * (NUM_MORE_CALLS - 1) + [1])
    assert (
        baked_in([[coins[0]], [coins[1]]], [[coins[0]], [coins[0]]], lambda: [coins[next(throws)]])
        is None
    )
    assert (
        baked_in([[coins[0]], [coins[1]]], [[coins[0]], [coins[0]]], lambda: [coins[0]]) == PROBLEM
    )
