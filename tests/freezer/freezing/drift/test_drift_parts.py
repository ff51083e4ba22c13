"""Drift of the parts of an output: fill values, few or small values beside them, and slices."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from freezer.freezing.drift import Call
from tests.support.drift_calls import call, drift


def masked(
    fill: float, dtype: torch.dtype = torch.float32, *, off: float = 0.0, size: int = 400
) -> Call:
    """Logits of some 10, a quarter of them masked; the candidate's others are off by a part of
    themselves.
    """
    generator = torch.Generator().manual_seed(0)
    r = torch.randn(4, size // 4, dtype=torch.float64, generator=generator) * 10
    r[:, ::4] = fill
    e = r.to(dtype)
    c = torch.where(e.abs() == e.abs().max(), e, (r * (1 + off)).to(dtype))
    return call(r, e, c)


@pytest.mark.parametrize(
    ("fill", "dtype", "off"),
    [(-1e9, torch.float32, 1e-2), (1e12, torch.float32, 1e-2), (-65504.0, torch.float16, 0.5)],
)
def test_fill_values_hide_no_other_error(fill: float, dtype: torch.dtype, off: float) -> None:
    assert drift(masked(fill, dtype)).passed
    report = drift(masked(fill, dtype, off=off))
    assert not report.passed
    assert (report.rows[0].rms or math.inf) < 100, "figures of the part that failed"


def scaled(fill: float, *, rows: int, live: int, off: float, add: float = 0.0) -> list[Call]:
    """Four sets of `rows` scores, of which all but `live` are masked; the candidate's live ones are
    off.
    """
    generator, calls = torch.Generator().manual_seed(0), []
    for index in range(4):
        r = torch.full((1, rows), fill, dtype=torch.float64)
        chosen = torch.randperm(rows, generator=generator)[:live]
        r[:, chosen] = torch.randn(live, dtype=torch.float64, generator=generator) * 10
        e = r.float()
        c = torch.where(r == fill, e, e * (1 + off) + add)
        calls.append(call(r, e, c, index=index))
    return calls


@pytest.mark.parametrize(
    ("fill", "rows", "live", "off", "add"),
    [
        (-1e9, 20_000, 50, -1.0, 0.0),
        (-1e9, 5, 2, 0.0, 100.0),
        (-65504.0, 400, 300, 1e-2, 0.0),
        (-1e6, 400, 300, 1e-2, 0.0),
    ],
)
def test_few_values_below_fill_values_are_judged(
    fill: float, rows: int, live: int, off: float, add: float
) -> None:
    """Top-50 of 20,000 logits, pointer scores of five, and fill values that are not extreme."""
    assert drift(*scaled(fill, rows=rows, live=live, off=1e-7)).passed
    assert not drift(*scaled(fill, rows=rows, live=live, off=off, add=add)).passed


def test_sets_are_pooled_by_magnitude() -> None:
    """A set of fill values alone belongs to the fill values of the others, not to their logits."""
    filled = torch.full((1, 5), -1e9, dtype=torch.float64)
    alone = call(filled, filled.float(), filled.float(), index=4)
    assert drift(*scaled(-1e9, rows=5, live=2, off=1e-7), alone).passed
    assert not drift(*scaled(-1e9, rows=5, live=2, off=0.0, add=100.0), alone).passed


def boxes(axis: int, *, probabilities: float = 1.0, size: float = 1e-4) -> Call:
    """Four box coordinates in pixels beside two class probabilities, on `axis` of the output; all
    between on one row.
    """
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(1, 100, 4, dtype=torch.float64, generator=generator).exp2() * 300
    between = torch.logspace(-6, 2, 100, dtype=torch.float64).reshape(1, 100, 1)
    scores = torch.rand(1, 100, 2, dtype=torch.float64, generator=generator) * size + size / 10
    r = torch.cat([pixels, between, scores], 2)
    c = torch.cat([pixels, between, scores * probabilities], 2)
    r, c = (values.movedim(2, axis).contiguous() for values in (r, c))
    return call(r, r.float(), c.float())


def test_slices_are_judged_without_float64() -> None:
    exact, zeroed = (boxes(2, probabilities=share, size=0.02) for share in (1.0, 0.0))
    assert drift(replace(exact, reference=exact.eager), float64=False).passed
    report = drift(replace(zeroed, reference=zeroed.eager), float64=False)
    assert "values at 5 of dim 2" in str(report.nearest_miss)


@pytest.mark.parametrize("axis", [1, 2])
def test_every_slice_is_judged_by_its_own_rms(axis: int) -> None:
    assert drift(boxes(axis, probabilities=1 + 1e-6)).passed
    report = drift(boxes(axis, probabilities=0.0))
    assert f"values at 5 of dim {axis}, of 6" in str(report.nearest_miss)


def test_slices_without_correct_digits_are_not_judged() -> None:
    """Channels that are zero but for rounding, or exactly zero in the reference."""
    generator = torch.Generator().manual_seed(0)
    r = torch.randn(4, 8, 16, dtype=torch.float64, generator=generator)
    r[:, 3], r[:, 4] = r[:, 3] * 1e-9, 0.0
    e, c = r.float(), r.float()
    c[:, 3:5] += 1e-8
    e[:, 3] -= 1e-9
    assert drift(call(r, e, c)).passed


@pytest.mark.parametrize(("num_live", "passed"), [(1, True), (8, False)])
def test_zeros_do_not_make_a_slice(num_live: int, passed: bool) -> None:
    """A channel that a ReLU hardly ever lets pass, in which eager errs less than elsewhere."""
    generator = torch.Generator().manual_seed(0)
    r = torch.rand(4, 8, 16, dtype=torch.float64, generator=generator).float().double() + 1
    r[:, 3] = 0.0
    r[0, 3, :num_live] = 2.0**-12
    e, c = r.float(), r.float()
    for wrong, off in ((e, 2e-7), (c, 3e-7)):
        wrong[r >= 1] += off
    c[0, 3, :num_live] += 3e-8
    assert drift(call(r, e, c)).passed == passed


def test_small_probabilities_pass() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50_000, dtype=torch.float64, generator=generator) * 8
    r, e = logits.softmax(0), logits.float().softmax(0)
    assert drift(call(r, e, logits.float().log_softmax(0).exp())).passed
