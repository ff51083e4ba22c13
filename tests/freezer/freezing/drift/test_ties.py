"""Discrete outputs: what rounding decides may differ, anything else may not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import freezer
from freezer.freezing.drift import at_ties
from freezer.freezing.judging import Judgement
from tests.support.drift_calls import call
from tests.support.models import Layers
from tests.support.steps import (
    artifact_of,
    judgement_in_place,
    quickly,
    random_inputs,
)

X = random_inputs(16, 64)
Head = Callable[[Tensor], Any]


class Scores(nn.Module):
    """4,000 scores, and an answer that depends on their order or steps.

    Args:
        in_parts: add the products in another order, so that the rounding is another.
        off: relative error of the scores; at most 2e-4 of each.
        swap: exchange two scores that are not neighbours.
    """

    def __init__(
        self, head: Head, *, in_parts: bool = False, off: float = 0.0, swap: bool = False
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4000, 64, generator=generator))
        self.head, self.in_parts, self.off, self.swap = head, in_parts, off, swap

    def forward(self, x: Tensor) -> Any:
        h = x @ self.weight.T
        if self.in_parts:
            h = x[:, 48:] @ self.weight[:, 48:].T + x[:, :48] @ self.weight[:, :48].T
        if self.off:
            h = h * (1 + self.off * torch.arange(4000).sin())
        if self.swap:
            h = torch.cat([h[:, 1:2], h[:, :1], h[:, 2:]], 1)
        return self.head(h)


def ids(h: Tensor) -> Any:
    return h.argsort(-1)


def decimals(h: Tensor) -> Any:
    return torch.round(h, decimals=2)


def angles(h: Tensor) -> Any:
    """One and angles of 0, which are NaN where the cosine is rounded to more than 1."""
    unit = h / h.norm(dim=-1, keepdim=True)
    return 1 + (unit * unit).sum(-1).acos()


def judged(head: Head, folder: Path, x: Tensor = X, **served: Any) -> Judgement:
    return judgement_in_place(Scores(head), Scores(head, **served), {"x": x}, folder)


@pytest.mark.parametrize("head", [ids, angles])
def test_other_sides_of_ties_pass(head: Head, tmp_path: Path) -> None:
    found: Any = judged(head, tmp_path, X[:4] if head is angles else X, in_parts=True)
    assert found.verdict == "published", found.reason
    assert sum(row.num_ties for row in found.winner.drift.rows) > 0
    assert found.winner.ties


@pytest.mark.parametrize(
    ("head", "wrong"),
    [
        (ids, {"swap": True}),
        (decimals, {"off": 1e-4}),
    ],
)
def test_other_differences_are_rejected(head: Head, wrong: dict[str, Any], tmp_path: Path) -> None:
    """Two scores exchanged, or all scores off by less than the steps between most of them, with
    ties besides.
    """
    assert judged(head, tmp_path, X[:4], in_parts=True, **wrong).verdict == "rejected"


def test_artifact_with_ties_loads(tmp_path: Path) -> None:
    """The golden outputs have the artifact's own answers at ties, so the canary finds them equal.
    Freezing folds the norm into the layer, which changes the rounding.
    """
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(5000)
    norm.running_mean, norm.running_var = torch.randn(5000), torch.rand(5000) + 0.5
    model = Layers(nn.Linear(64, 5000), norm, then=lambda y: y.softmax(-1).argsort(-1))
    result: Any = quickly(model, [X], tmp_path / "made")
    assert result.judgement.best.ties, "the example needs ties"
    assert freezer.load(artifact_of(result).folder)(X).shape == (16, 5000)


def test_answers_must_be_eagers_or_the_references() -> None:
    """Of four places where all three differ, the candidate has eager's answer, the reference's, a
    rerun's, and none of them.
    """
    r = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8] * 4)
    e, c, rerun = r.clone(), r.clone(), r.clone()
    e[0], c[1], e[1], c[2], rerun[2] = 9, 2, 9, 9, 9
    given = call(r, e, c)
    found: Any = at_ties([given], {0}, lambda _: [[rerun]])
    (settled,), places = found
    assert places[0][0].nonzero().flatten().tolist() == [0, 1, 2]
    assert torch.equal(settled.eager[0], c)
    c[3] = 9
    assert at_ties([given], {0}, lambda _: [[rerun]]) is None
    assert at_ties([given], {0}, lambda _: None) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_misplaced_values_must_be_reruns(value: float) -> None:
    """NaN and Inf where eager has numbers or the reverse, where a rerun has them and elsewhere."""
    r = torch.arange(1, 101, dtype=torch.float64)
    e, c, rerun = r.float(), r.float(), r.float()
    c[3] = rerun[3] = value
    e[5] = value
    for only in (True, False):
        found: Any = at_ties([call(r, e, c)], {0}, lambda _: [[rerun]], only_misplaced=only)
        assert found[1][0][0].nonzero().flatten().tolist() == [3, 5]
    beyond, others = c.clone(), [c.clone() for _ in range(2)]
    beyond[5] = 100
    others[0][7], others[1][7] = math.nan, math.inf
    for wrong in (beyond, *others):
        assert at_ties([call(r, e, wrong)], {0}, lambda _: [[rerun]], only_misplaced=True) is None
    assert at_ties([call(r, e, c)], {0}, lambda _: None, only_misplaced=True) is None


def test_noise_of_reruns_explains_no_drift() -> None:
    """An element that is off by more than rounding is not excused by reruns whose noise reaches as
    far.
    """
    generator = torch.Generator().manual_seed(0)
    r = torch.randn(1000, dtype=torch.float64, generator=generator)
    noise = 1e-5 * torch.randn(1000, dtype=torch.float64, generator=generator)
    c = (r + 30 * noise * (torch.arange(1000) % 10 == 0)).float()
    calls = [call(r, (r + noise).float(), c)]
    assert at_ties(calls, {0}, lambda _: [[(r + 30 * noise).float()]]) is None


def test_other_calls_explain_only_equal_answers() -> None:
    """The answer that a model without its state gives to the same inputs after other calls is not a
    tie.
    """
    first, later = torch.arange(10), torch.arange(10)
    later[0] = 7
    stateful = [call(first, first, first), call(later, later, first)]
    assert at_ties(stateful, {0}, lambda _: [[first], [later]]) is None
    equal = [call(first, first, first), call(first, first, later)]
    assert at_ties(equal, {0}, lambda _: [[later], [first]]) is not None


class Rounded(nn.Module):
    """Many values between two decimals, so that eager flips some."""

    def __init__(self, off: float) -> None:
        super().__init__()
        self.off = off

    def forward(self, x: Tensor) -> Tensor:
        return torch.round((x + 100) - 100, decimals=2) * (1 + self.off)


def test_errors_beside_eagers_flips_are_rejected(tmp_path: Path) -> None:
    x = random_inputs(32_000)
    found = judgement_in_place(Rounded(0.0), Rounded(2e-5), {"x": x}, tmp_path)
    assert found.verdict == "rejected", found.reason
