"""Comparison with golden outputs: fill values, and bounds for an eager reference."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from freezer.compare.gate import GoldenGate, OutputError, gate_problem
from freezer.compare.numerics import distances, exact_problem, pooled, rms_errors
from tests.support.steps import random_inputs

APART = (2.0**29,)
"""The scales of `masked` outputs."""


def masked(fill: float = -1e9) -> Tensor:
    x = random_inputs(8, 16)
    return x.masked_fill(x > 1, fill)


def problem(r: Tensor, c: Tensor, reference: Literal["float64", "eager"]) -> str | None:
    rmse, rms, _ = rms_errors(r, c, APART)
    error = OutputError(rmse=rmse, native_rmse=1e-8, rms=rms, dtype=r.dtype, num_elements=r.numel())
    return gate_problem(
        error,
        GoldenGate(error_ratio_max=3.0, reference=reference),
        distances(r, c, limits=APART)[0],
    )


def test_fill_values_do_not_hide_other_errors() -> None:
    r = masked()
    wrong = torch.where(r > -1e8, r * 1.01, r)
    assert exact_problem(r, wrong, APART) is None
    assert problem(r, r, "float64") is None
    assert "error_ratio" in str(problem(r, wrong, "float64"))
    assert "error_ratio" in str(problem(r, wrong, "eager"))
    assert pooled([r, r], [r, wrong], APART)[0] > 1e-3


def test_answers_whose_squares_overflow_are_a_problem() -> None:
    r = random_inputs(8, 16).double()
    assert "rmse inf" in str(problem(r, r + 1e200, "eager"))


def test_figures_of_tiny_outputs() -> None:
    tiny = torch.tensor([1e-160, 1e-100], dtype=torch.float64)
    found = distances(tiny, tiny / 2)[0].figures()
    assert found.sqnr_db == pytest.approx(20 * math.log10(2))
    assert found.cosine == pytest.approx(1)
    assert found.gain == pytest.approx(0.5)


def test_fill_values_may_differ_by_rounding() -> None:
    r = masked()
    assert exact_problem(r, torch.where(r < -1e8, r + 64, r), APART) is None
    assert (
        exact_problem(r, torch.where(r < -1e8, r * 0.9, r), APART)
        == "the greatest values, of 1e+09, are off by 1e+08"
    )


def test_bounds_with_an_eager_reference() -> None:
    r = random_inputs(100) * 1e-3
    assert problem(r, r + 5e-7, "eager") is None
    assert problem(r, r + 5e-7, "float64") is not None
    assert problem(r, r + 3e-5, "eager") is not None
    assert problem(r * 0.01, r * 0.02, "eager") is not None
    assert problem(torch.zeros(100), torch.full((100,), 1e-3), "eager") is not None
