"""Drift: every figure against NumPy in float64, and every rule of the gate."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from freezer.compare import OutputError, judge_rmse
from freezer.freezing.drift import Call, Gate, assess
from tests.support.drift_calls import call, drift, rounded

EPS = float(np.finfo(np.float32).eps)


def test_figures_equal_numpy() -> None:
    rng = np.random.default_rng(0)
    r = rng.normal(size=(16, 10))
    e = (r + rng.normal(size=r.shape) * 1e-6).astype(np.float32)
    c = (r + rng.normal(size=r.shape) * 2e-6).astype(np.float32)
    (row,) = drift(call(torch.from_numpy(r), torch.from_numpy(e), torch.from_numpy(c))).rows
    e64, c64 = e.astype(np.float64), c.astype(np.float64)
    native, rmse, rms = (float(np.sqrt(np.mean(x**2))) for x in (e64 - r, c64 - r, r))
    expected = {
        "max_abs_err": np.abs(c64 - r).max(),
        "max_rel_err": (
            (np.abs(c64 - r) / np.maximum(np.maximum(np.abs(c64), np.abs(r)), EPS)).max()
        ),
        "rmse": rmse,
        "native_rmse": native,
        "rms": rms,
        "error_ratio": rmse / native,
        "sqnr_db": 10 * np.log10((r**2).sum() / ((r - c64) ** 2).sum()),
        "cosine": (c64 * r).sum() / np.sqrt((c64**2).sum() * (r**2).sum()),
        "gain": (c64 * r).sum() / (r**2).sum(),
        "top1_agreement": (r.argmax(1) == c64.argmax(1)).mean(),
        "bound": max(3 * native, 3 * native + 1e-5 * rms),
    }
    for name, value in expected.items():
        assert getattr(row, name) == pytest.approx(value, rel=1e-9), name
    assert row.num_elements == 160
    assert row.problem is None


def test_top1_agreement() -> None:
    r = torch.eye(64, dtype=torch.float64)
    c = r.float()
    c[0], c[1] = c[1].clone(), c[0].clone()
    (row,) = drift(call(r, r.float(), c)).rows
    assert row.top1_agreement == pytest.approx(62 / 64)
    (flat,) = drift(call(r.flatten(), r.float().flatten(), c.flatten())).rows
    assert flat.top1_agreement is None


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
    native, rms = 0.5, 8.0
    _, bound = judge_rmse(
        OutputError(rmse=0.0, native_rmse=native, rms=rms, dtype=dtype, num_elements=num_elements),
        0.0,
    )
    assert bound == pytest.approx(multiplier * native + tol * rms / 10)


@pytest.mark.parametrize(
    ("rmse", "native_rmse", "rms", "error_ratio_max", "expected"),
    [
        (6.0, 2.0, 1.0, 7.0, (3.0, 14.0)),
        (0.0, 0.0, 0.0, 3.0, (0.0, 0.0)),
        (1.0, 0.0, 0.0, 3.0, (math.inf, 0.0)),
    ],
)
def test_ratio_and_bound(
    rmse: float,
    native_rmse: float,
    rms: float,
    error_ratio_max: float,
    expected: tuple[float, float],
) -> None:
    error = OutputError(
        rmse=rmse, native_rmse=native_rmse, rms=rms, dtype="float32", num_elements=5000
    )
    assert judge_rmse(error, error_ratio_max) == expected


@pytest.mark.parametrize(("candidate", "passes"), [(2.9e-3, True), (3.1e-3, False)])
def test_either_rule_suffices(candidate: float, passes: bool) -> None:
    # 2,000 elements: the ratio allows 3 times the native error, the ladder 2 times and 1e-5 of rms
    # 1.5.
    assert drift(call(*rounded(2000, 1e-3, candidate))).passed is passes
    allowed_by_tol = rounded(2000, 1e-7, 1.2e-5)
    assert drift(call(*allowed_by_tol)).passed
    assert not drift(call(*rounded(2000, 1e-7, 1.8e-5))).passed


def test_small_outputs_are_pooled_over_sets() -> None:
    # Seven sets in which both are off by 1e-7, and one in which eager happens to be right: a ratio
    # of 100 by itself.
    errors = [(1e-7, 1e-7)] * 7 + [(1e-9, 1e-7)]
    calls = []
    for index, (native, candidate) in enumerate(errors):
        r = torch.tensor([[1e-4]], dtype=torch.float64)
        calls.append(
            call(r, r.float().double() + native, r.float().double() + candidate, index=index)
        )
    lucky = calls[-1]
    as_float32 = [
        call(
            item.reference[0],
            item.eager[0].float(),
            item.candidate[0].float(),
            index=item.set_index,
        )
        for item in calls
    ]
    report = drift(*as_float32)
    assert report.passed, report.nearest_miss
    assert not drift(as_float32[-1]).passed, "alone, without the pool, the lucky set is a rejection"
    wide = [
        t.expand(64, 1).contiguous()
        for t in (lucky.reference[0], lucky.eager[0].float(), lucky.candidate[0].float())
    ]
    assert not drift(*as_float32[:-1], call(*wide, index=7)).passed, (
        "64 elements speak for themselves"
    )


@pytest.mark.parametrize("float64", [True, False])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_must_match_eager(wrong: float, float64: bool) -> None:
    r, e, c = rounded(100, 0, 0)
    e[3] = wrong
    assert not drift(call(r, e, c), float64=float64).passed
    c[3] = wrong
    assert drift(call(r, e, c), float64=float64).passed
    c[4], c[3] = c[3].clone(), c[4].clone()
    report = drift(call(r, e, c), float64=float64)
    assert "at other places" in (report.nearest_miss or "")


def test_strides_dtype_and_shape_must_match_eager() -> None:
    r, e, c = (t.reshape(8, 16) for t in rounded(128, 0, 0))
    for other, problem in [
        (c.t().contiguous().t(), "strides"),
        (c.double(), "dtype"),
        (c.reshape(16, 8), "shape"),
    ]:
        report = drift(call(r, e, other))
        assert not report.passed
        assert problem in (report.nearest_miss or "")
    one_row = torch.empty_strided((1, 16), (99, 1)).copy_(c[:1])
    assert drift(call(r[:1], e[:1], one_row)).passed, "the stride of a single row means nothing"


@pytest.mark.parametrize(
    "view", [lambda t: t[:, ::2], lambda t: t.t()[::2], lambda t: t[:1].expand(8, 16)]
)
def test_views_with_gaps_may_become_dense(view: Callable[[Tensor], Tensor]) -> None:
    r, e, c = (view(t.reshape(8, 16)) for t in rounded(128, 0, 0))
    dense = torch.empty_like(e).copy_(c)
    assert dense.stride() != e.stride()
    assert drift(call(r, e, dense)).passed
    other = (
        dense.t().clone(memory_format=torch.contiguous_format).t()
        if dense.is_contiguous()
        else dense.contiguous()
    )
    assert not drift(call(r, e, other)).passed, "but in the same order of dims"


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integers_and_bools_must_be_equal(dtype: torch.dtype) -> None:
    e = torch.ones(100, dtype=dtype)
    c = e.clone()
    report = drift(call(e, e, c))
    assert report.passed
    assert report.error_ratio is None
    c[7] = 0
    assert (
        drift(call(e, e, c)).nearest_miss
        == "output 'out', input set 0 (single): 1 of 100 elements differ"
    )


def test_noise_of_eager_raises_the_floor() -> None:
    rows = call(*rounded(2000, 1e-3, 5e-3))
    assert not drift(rows).passed
    noisy = drift(call(*rounded(2000, 1e-3, 5e-3), noise=2e-3))
    assert noisy.passed
    assert noisy.rows[0].native_rmse == pytest.approx(math.sqrt(1e-6 + 4e-6), rel=1e-3)
    pooled = drift(*(call(*rounded(10, 1e-3, 5e-3), index=i, noise=2e-3) for i in range(4)))
    assert pooled.rows[0].native_rmse == pytest.approx(math.sqrt(1e-6 + 4e-6), rel=1e-3)


@pytest.mark.parametrize(
    ("dtype", "relative", "passes"),
    [
        (torch.float32, 5e-4, True),
        (torch.float32, 2e-3, False),
        (torch.float16, 2e-2, True),
        (torch.float16, 8e-2, False),
        (torch.bfloat16, 8e-2, True),
        (torch.bfloat16, 2e-1, False),
    ],
)
def test_without_float64_bounds_are_openvinos(
    dtype: torch.dtype, relative: float, passes: bool
) -> None:
    e = (torch.arange(1, 101).double() * 10).to(dtype)
    c = (e.double() * (1 + relative * torch.tensor([1, -1]).repeat(50))).to(dtype)
    report = drift(call(e, e, c), float64=False, limit=1e9)
    assert report.passed is passes
    assert report.margin is None, "rmse was held to no bound"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("factor", [0.0, 0.5, 1.2, 2.0])
def test_without_float64_outputs_keep_their_size(
    factor: float, size: float, dtype: torch.dtype
) -> None:
    """Probabilities of 20,000 classes, or logits; and harmless rounding, of values near
    zero too.
    """
    generator = torch.Generator().manual_seed(0)
    r = torch.randn(4, 500, dtype=torch.float64, generator=generator) * size
    e, eps = r.to(dtype), torch.finfo(dtype).eps
    rounding = torch.randn(r.shape, dtype=torch.float64, generator=generator) * size * eps / 2
    assert drift(call(e, e, (e.double() + rounding).to(dtype)), float64=False).passed
    assert not drift(call(e, e, (e.double() * factor).to(dtype)), float64=False).passed


@pytest.mark.parametrize(("dtype", "gain"), [(torch.float16, 1.03), (torch.bfloat16, 1.05)])
def test_without_float64_a_gain_is_not_rounding(dtype: torch.dtype, gain: float) -> None:
    e = (torch.arange(1, 1001).double() * 10).to(dtype)
    errors = torch.tensor([gain, 2 - gain], dtype=torch.float64).repeat(500)
    assert drift(call(e, e, (e.double() * errors).to(dtype)), float64=False).passed, (
        "within the relative bound"
    )
    report = drift(call(e, e, (e.double() * gain).to(dtype)), float64=False)
    assert f"gain {gain}" in str(report.nearest_miss)


def test_nearest_miss_names_the_sufficient_limit() -> None:
    calls = [
        call(*rounded(2000, 1e-3, worse * 1e-3), index=index)
        for index, worse in enumerate((4.5, 6.25, 1.0))
    ]
    report = drift(*calls)
    assert (
        report.nearest_miss
        == "output 'out', input set 1 (single): error_ratio 6.25 > 3; limits.error_ratio_max: 7"
        " would have passed"
    )
    far = drift(call(*rounded(2000, 1e-3, 31e-3)))
    assert far.nearest_miss == "output 'out', input set 0 (single): error_ratio 31 > 3", (
        "no limit is recommended"
    )
    assert drift(*calls, limit=7.0).passed
    assert not drift(*calls, limit=6.0).passed


def test_missing_figures_fail() -> None:
    assert not drift().passed
    assert drift().nearest_miss == "no output was compared"
    r, e, c = rounded(100, 0, 0)
    report = drift(call([r, r], [e, e], [c]), names=("a", "b"))
    assert not report.passed
    assert "1 outputs, eager gives 2" in (report.nearest_miss or "")
    nan = torch.full((100,), math.nan, dtype=torch.float64)
    assert not drift(call(r, e, nan.float())).passed


def test_output_that_is_always_nan_fails() -> None:
    nan = torch.full((100,), math.nan, dtype=torch.float64)
    report = drift(
        call(nan, nan.float(), nan.float()), call(nan, nan.float(), nan.float(), index=1)
    )
    assert not report.passed
    assert "only NaN or Inf" in (report.nearest_miss or "")
    some = nan.clone()
    some[0] = 1.0
    assert drift(
        call(some, some.float(), some.float()), call(nan, nan.float(), nan.float(), index=1)
    ).passed
    empty = torch.zeros(0, dtype=torch.float64)
    assert drift(call(empty, empty.float(), empty.float())).passed


def test_overflowing_squares_are_a_problem_of_the_row() -> None:
    """Also where only the candidate's overflow, or those of both; its figures stay finite or are
    absent.
    """
    r, e, _ = rounded(100, 1e-6, 0.0)
    huge = torch.full((100,), 1e200, dtype=torch.float64)
    for given in (
        call(r, e.double(), huge),
        call(huge, huge, huge),
        call(huge, huge, -huge),
        call(huge, huge, 2 * huge),
    ):
        found = drift(given, call(r, e.double(), e.double(), index=1))
        assert not found.passed
        assert "overflow" in str(found.nearest_miss)
        json.dumps(found.summary(), allow_nan=False)
    assert not drift(call(r, e.double(), huge), float64=False).passed


def test_margin_of_almost_equal_outputs_is_finite() -> None:
    r = torch.full((2000,), 1e150, dtype=torch.float64)
    c = torch.cat([r[:-1], torch.tensor([1e150 * (1 - 2**-53)], dtype=torch.float64)])
    tiny = torch.full((2000,), 5e-162, dtype=torch.float64)
    for given in (call(r, r, c), call(tiny, tiny, tiny * 1.5), call(0 * tiny, tiny + 1e150, tiny)):
        json.dumps(drift(given, limit=30).summary(), allow_nan=False)


def test_noise_is_allowed_without_float64() -> None:
    r, _, c = rounded(100, 0.0, 0.1)
    assert not drift(call(r.float(), r.float(), c), float64=False).passed
    assert drift(call(r.float(), r.float(), c, noise=0.1), float64=False).passed
    assert not drift(call(r.float(), r.float(), c, noise=0.01), float64=False).passed


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


def test_outputs_of_a_call_are_released_before_the_next() -> None:
    r, e, c = rounded(100, 1e-7, 1e-7)
    made: list[weakref.ref[Tensor]] = []

    def calls() -> Iterator[Call]:
        for index in range(3):
            assert all(earlier() is None for earlier in made[:-1])
            output = c.clone()
            made.append(weakref.ref(output))
            yield call(r, e, output, index=index)

    assess("recipe", ["out"], calls(), Gate(error_ratio_max=3.0, float64=True), [()])
    assert len(made) == 3
