"""Drift: every figure against NumPy in float64, and every rule of the gate."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import Tensor

from freezer.compare import OutputError, judge_rmse
from freezer.freezing.drift import Call
from tests.support.drift_calls import call, drift, rounded

EPS = float(np.finfo(np.float32).eps)


def test_figures_equal_numpy() -> None:
    rng = np.random.default_rng(0)
    r = rng.normal(size=(16, 10))
    e = (r + rng.normal(size=r.shape) * 1e-6).astype(np.float32)
    c = (r + rng.normal(size=r.shape) * 2e-6).astype(np.float32)
    (row,) = drift(call(*map(torch.from_numpy, (r, e, c)))).rows
    error = np.abs(c - r)
    native, rmse, rms = (float(np.sqrt(np.mean(x**2))) for x in (e - r, error, r))
    largest = np.maximum(np.abs(c), np.abs(r))
    inner = (c * r).sum()
    norms = np.linalg.norm(r) * np.linalg.norm(c.astype(np.float64))
    expected = {
        "max_abs_err": error.max(),
        "max_rel_err": (error / np.maximum(largest, EPS)).max(),
        "rmse": rmse,
        "native_rmse": native,
        "rms": rms,
        "error_ratio": rmse / native,
        "sqnr_db": 20 * np.log10(rms / rmse),
        "cosine": inner / norms,
        "gain": inner / (r**2).sum(),
        "bound": 3 * native + 1e-5 * rms,
    }
    for name, value in expected.items():
        assert getattr(row, name) == pytest.approx(value, rel=1e-9), name
    assert row.num_elements == 160
    assert row.problem is None


# The gate


@pytest.mark.parametrize(
    ("dtype", "num_elements", "multiplier", "tol"),
    [
        ("float32", 1000, 2, 1e-4),
        ("float32", 999, 3, 1e-4),
        ("float16", 1000, 3, 1e-2),
        ("bfloat16", 5000, 3, 1e-2),
    ],
)
def test_second_rule_is_dynamos(
    dtype: str, num_elements: int, multiplier: float, tol: float
) -> None:
    error = OutputError(rmse=0.0, native_rmse=0.5, rms=8.0, dtype=dtype, num_elements=num_elements)
    _, bound = judge_rmse(error, 0.0)
    assert bound == pytest.approx(multiplier * 0.5 + tol * 0.8)


@pytest.mark.parametrize(("rmse", "expected"), [(0.0, (0.0, 0.0)), (1.0, (math.inf, 0.0))])
def test_ratio_of_outputs_of_zero(rmse: float, expected: tuple[float, float]) -> None:
    error = OutputError(rmse=rmse, native_rmse=0.0, rms=0.0, dtype="float32", num_elements=5000)
    assert judge_rmse(error, 3.0) == expected


@pytest.mark.parametrize(("candidate", "passes"), [(2.9e-3, True), (3.1e-3, False)])
def test_either_rule_suffices(candidate: float, passes: bool) -> None:
    # 2,000 elements: the ratio allows 3 times the native error, the ladder 2 times and 1e-5 of rms
    # 1.5.
    assert drift(call(*rounded(2000, 1e-3, candidate))).passed is passes
    allowed_by_tol = rounded(2000, 1e-7, 1.2e-5)
    assert drift(call(*allowed_by_tol)).passed
    assert not drift(call(*rounded(2000, 1e-7, 1.8e-5))).passed


def off_by(native: float, candidate: float, num: int, index: int) -> Call:
    r = torch.full((num,), 1e-4, dtype=torch.float64)
    e = r.float().double()
    return call(r, (e + native).float(), (e + candidate).float(), index=index)


def test_small_outputs_are_pooled_over_sets() -> None:
    """In one of eight sets eager happens to be right: a ratio of 100 by itself."""
    usual = [off_by(1e-7, 1e-7, 1, index) for index in range(7)]
    assert drift(*usual, off_by(1e-9, 1e-7, 1, 7)).passed
    assert not drift(off_by(1e-9, 1e-7, 1, 7)).passed
    assert not drift(*usual, off_by(1e-9, 1e-7, 64, 7)).passed


@pytest.mark.parametrize("float64", [True, False])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_must_match_eager(wrong: float, float64: bool) -> None:
    r, e, c = rounded(100, 0, 0)
    e[3] = wrong
    assert not drift(call(r, e, c), float64=float64).passed
    c[3] = wrong
    assert drift(call(r, e, c), float64=float64).passed
    assert not drift(call(r, e, c.roll(1)), float64=float64).passed


@pytest.mark.parametrize(
    "change", [lambda c: c.t().contiguous().t(), lambda c: c.double(), lambda c: c.reshape(16, 8)]
)
def test_structure_must_match_eager(change: Callable[[Tensor], Tensor]) -> None:
    """Strides, dtype and shape."""
    r, e, c = (t.reshape(8, 16) for t in rounded(128, 0, 0))
    assert not drift(call(r, e, change(c))).passed


def test_stride_of_one_row_is_arbitrary() -> None:
    r, e, c = (t.reshape(1, 128) for t in rounded(128, 0, 0))
    one_row = torch.empty_strided((1, 128), (999, 1)).copy_(c)
    assert drift(call(r, e, one_row)).passed


@pytest.mark.parametrize("view", [lambda t: t[:, ::2], lambda t: t[:1].expand(8, 16)])
def test_views_with_gaps_may_become_dense(view: Callable[[Tensor], Tensor]) -> None:
    r, e, c = (view(t.reshape(8, 16)) for t in rounded(128, 0, 0))
    dense = torch.empty_like(e).copy_(c)
    assert dense.stride() != e.stride()
    assert drift(call(r, e, dense)).passed
    assert not drift(call(r, e, dense.t().contiguous().t())).passed, "in another order of dims"


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integers_and_bools_must_be_equal(dtype: torch.dtype) -> None:
    e = torch.ones(100, dtype=dtype)
    report = drift(call(e, e, e.clone()))
    assert report.passed
    assert report.measured.error_ratio is None
    c = e.clone()
    c[7] = 0
    assert not drift(call(e, e, c)).passed


def test_noise_of_eager_raises_the_floor() -> None:
    given = rounded(2000, 1e-3, 5e-3)
    assert not drift(call(*given)).passed
    small = [call(*rounded(10, 1e-3, 5e-3), index=index, noise=2e-3) for index in range(4)]
    for noisy in (drift(call(*given, noise=2e-3)), drift(*small)):
        assert noisy.passed
        assert noisy.rows[0].native_rmse == pytest.approx(math.sqrt(5e-6), rel=1e-3)


@pytest.mark.parametrize(
    ("dtype", "right", "wrong"),
    [
        (torch.float32, 5e-4, 2e-3),
        (torch.float16, 2e-2, 8e-2),
        (torch.bfloat16, 8e-2, 2e-1),
    ],
)
def test_without_float64_bounds_are_openvinos(
    dtype: torch.dtype, right: float, wrong: float
) -> None:
    e = (torch.arange(1, 101).double() * 10).to(dtype)
    signs = torch.tensor([1, -1]).repeat(50)
    for relative in (right, wrong):
        c = (e.double() * (1 + relative * signs)).to(dtype)
        report = drift(call(e, e, c), float64=False, limit=1e9)
        assert report.passed is (relative == right)
        assert report.measured.margin is None, "rmse was held to no bound"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-3, 1e3])
@pytest.mark.parametrize("factor", [0.0, 1.2])
def test_without_float64_outputs_keep_their_size(
    factor: float, size: float, dtype: torch.dtype
) -> None:
    """Probabilities of many classes, or logits; rounding passes, also of values near zero."""
    generator = torch.Generator().manual_seed(0)
    r, noise = torch.randn(2, 4, 500, dtype=torch.float64, generator=generator) * size
    e = r.to(dtype)
    rounded_otherwise = e.double() + noise * torch.finfo(dtype).eps / 2
    assert drift(call(e, e, rounded_otherwise.to(dtype)), float64=False).passed
    assert not drift(call(e, e, (e.double() * factor).to(dtype)), float64=False).passed


def test_nearest_miss_names_the_sufficient_limit() -> None:
    calls = [
        call(*rounded(2000, 1e-3, worse), index=index)
        for index, worse in enumerate((4.5e-3, 6.25e-3, 1e-3))
    ]
    miss = str(drift(*calls).nearest_miss)
    assert "input set 1" in miss
    assert "limits.error_ratio_max: 7" in miss
    assert drift(*calls, limit=7.0).passed
    assert not drift(*calls, limit=6.0).passed
    far = drift(call(*rounded(2000, 1e-3, 31e-3)))
    assert "error_ratio_max" not in str(far.nearest_miss)


def equal(r: Tensor, index: int = 0) -> Call:
    return call(r, r.float(), r.float(), index=index)


def test_output_that_is_always_nan_fails() -> None:
    nan = torch.full((100,), math.nan, dtype=torch.float64)
    some = nan.clone()
    some[0] = 1.0
    assert not drift(equal(nan), equal(nan, 1)).passed
    assert drift(equal(some), equal(nan, 1)).passed
    assert drift(equal(nan[:0])).passed


def test_overflowing_squares_are_a_problem_of_the_row() -> None:
    """Also where only the candidate's overflow, or those of both; its figures stay finite or are
    absent.
    """
    r, e, _ = rounded(100, 1e-6, 0.0)
    huge = torch.full((100,), 1e200, dtype=torch.float64)
    for given in (call(r, e.double(), huge), call(huge, huge, huge), call(huge, huge, -huge)):
        report = drift(given, call(r, e.double(), e.double(), index=1))
        assert not report.passed
        assert "overflow" in str(report.nearest_miss)
        json.dumps(asdict(report.measured), allow_nan=False)
    assert not drift(call(r, e.double(), huge), float64=False).passed


@pytest.mark.parametrize(("noise", "passes"), [(0.0, False), (0.01, False), (0.1, True)])
def test_noise_is_allowed_without_float64(noise: float, passes: bool) -> None:
    r, _, c = rounded(100, 0.0, 0.1)
    assert drift(call(r.float(), r.float(), c, noise=noise), float64=False).passed is passes


def test_without_correct_digits_eager_is_matched() -> None:
    """Eager is off by half of the output, as in chaotic models; a candidate three times as far off
    fails.
    """
    generator = torch.Generator().manual_seed(0)
    r = torch.randn(2000, dtype=torch.float64, generator=generator)
    e = (r + torch.randn(2000, dtype=torch.float64, generator=generator) * 0.5).float()
    assert drift(call(r, e, e * (1 + 1e-4))).passed
    report = drift(call(r, e, torch.zeros(2000)))
    assert "eager has no correct digits here" in str(report.nearest_miss)
    assert drift(call(r * 1e-8, e * 1e-8, r.float() * 2e-8)).passed, "zero but for rounding"
