"""Comparison with golden outputs: dtypes, fill values, and bounds for an eager reference."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from freezer.compare import (
    Gate,
    Values,
    compare,
    distances,
    golden_problem,
    pooled,
    structure_problem,
)
from freezer.runtime.tensors import values_of
from tests.support.steps import random_inputs

APART = (2.0**29,)
"""The scales of `masked` outputs."""


def masked(fill: float = -1e9) -> Tensor:
    x = random_inputs(8, 16)
    return x.masked_fill(x > 1, fill)


def problem(r: Tensor, c: Tensor, *, float64: bool) -> str | None:
    small = distances(values_of(r), values_of(c), limits=APART)[0]
    error = replace(small.error(values_of(r).dtype, r.numel()), native_rmse=1e-8)
    _, found = golden_problem(error, Gate(error_ratio_max=3.0, float64=float64), small)
    return found


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float8_e5m2,
        torch.complex32,
        torch.complex128,
        torch.uint8,
        torch.bool,
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_values_equal_the_tensors(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.0, 1.0, 1.75, 2.0, 96.0, 112.0]).to(dtype)
    values = values_of(tensor)
    assert values.dtype == str(dtype).removeprefix("torch.")
    assert values.array.tolist() == tensor.tolist()
    negated = tensor.conj() if dtype.is_complex else tensor
    assert values_of(negated).array.tolist() == negated.tolist()


@pytest.mark.parametrize("num", [0, 1, 5, 15, 16, 67, 1000, 31_999, 70_000])
def test_sums_equal_those_of_torch(num: int) -> None:
    """Figures are the same bits in every release and with every CPU."""
    r = torch.randn(num, dtype=torch.float64, generator=torch.Generator().manual_seed(num))
    sums = distances(values_of(r), values_of(r + 1e-6))[0]
    expected = [float((part + 1e-6 - part).square().sum()) for part in r.split(32_000)]
    assert sums.noise == sum(expected)
    assert sums.num_elements == num


def test_fill_values_may_differ_by_rounding() -> None:
    r = masked()
    rounded, wrong = torch.where(r < -1e8, r + 64, r), torch.where(r < -1e8, r * 0.9, r)
    assert compare(values_of(r), values_of(rounded), APART).problem is None
    found = compare(values_of(r), values_of(wrong), APART)
    assert found.problem is not None
    assert pooled([found]).rmse == math.inf


def test_answers_whose_squares_overflow_are_a_problem() -> None:
    r = random_inputs(8, 16).double()
    assert problem(r, r + 1e200, float64=False) is not None


def test_figures_of_tiny_outputs() -> None:
    tiny = np.array([1e-160, 1e-100])
    r = Values(array=tiny, dtype="float64")
    c = Values(array=tiny / 2, dtype="float64")
    found = distances(r, c)[0]
    assert found.sqnr_db == pytest.approx(20 * math.log10(2))
    assert found.cosine == pytest.approx(1)
    assert found.gain == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("scale", "factor", "shift", "float64", "passes"),
    [
        (1e-3, 1.0, 5e-7, False, True),
        (1e-3, 1.0, 5e-7, True, False),
        (1e-3, 1.0, 3e-5, False, False),
        (1e-5, 2.0, 0.0, False, False),
        (0.0, 1.0, 1e-3, False, False),
    ],
)
def test_bounds_with_an_eager_reference(
    scale: float, factor: float, shift: float, float64: bool, passes: bool
) -> None:
    r = random_inputs(100) * scale
    assert (problem(r, r * factor + shift, float64=float64) is None) is passes


def test_large_outputs_are_compared_in_blocks() -> None:
    values = Values(array=np.ones((1, 20, 500, 400), np.complex64), dtype="complex64")
    tracemalloc.start()
    distances(values, values, values, limits=[100.0])
    structure_problem(values, values)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < values.array.nbytes / 3
