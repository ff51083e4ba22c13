"""How far two answers to the same inputs are from each other, and how far the gate lets one be from the golden outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from freezer.drift import comparable, judge_rmse, openvino_problem, parts_of

EAGER_REFERENCE_TOL = 1e-3
"""Relative error of outputs whose reference was eager: OpenVINO's bound for float32; lower precisions get theirs by dtype."""


def exact_problem(r: Tensor, c: Tensor) -> str | None:
    """What differs in what must be the same: shape, dtype, integers, places of NaN and Inf; and fill values but for rounding."""
    if r.shape != c.shape or r.dtype != c.dtype:
        return f"got {c.dtype} {list(c.shape)}, expected {r.dtype} {list(r.shape)}"
    if not comparable(r):
        wrong = int((r != c).sum())
        return f"{wrong} of {r.numel()} elements differ" if wrong else None
    infinite = r.isinf()
    if not torch.equal(r.isnan(), c.isnan()) or not torch.equal(infinite, c.isinf()) or not torch.equal(r[infinite], c[infinite]):
        return "NaN or Inf at other places"
    for one, other in parts(r, c)[1:]:
        rmse, rms = _rms(other - one), _rms(one)
        if not rmse <= judge_rmse(rmse, 0.0, rms, dtype=r.dtype, num_elements=one.numel(), error_ratio_max=3.0)[1]:
            return f"the greatest values, of {rms:.3g}, are off by {rmse:.3g}"
    return None


def parts(r: Tensor, c: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The elements that are finite in both, flat and in double precision, by the parts that are judged apart; the lesser first."""
    finite = r.isfinite() & c.isfinite()
    r64, c64 = (tensor[finite].to(torch.complex128 if r.is_complex() else torch.float64) for tensor in (r, c))
    return [(r64[chosen], c64[chosen]) for chosen in parts_of(r64, r.dtype)]


def errors(r: Tensor, c: Tensor) -> tuple[float, float, float]:
    """rmse, rms of the reference, and the largest absolute error, over finite elements; rmse and rms without fill values."""
    found = parts(r, c)
    r64, c64 = found[0]
    worst = max((float((other - one).abs().max()) for one, other in found if one.numel()), default=0.0)
    return _rms(c64 - r64), _rms(r64), worst


def _rms(values: Tensor) -> float:
    return math.sqrt(float((values.abs() ** 2).sum()) / max(values.numel(), 1))


def pooled(expected: Sequence[Tensor], got: Sequence[Tensor]) -> tuple[float, float]:
    """Rmse and rms of one output over several sets; infinite where they cannot be compared."""
    if any(exact_problem(r, c) or not comparable(r) for r, c in zip(expected, got, strict=True)):
        return math.inf, 0.0
    rmse, rms, _ = errors(torch.cat([r.flatten() for r in expected]), torch.cat([c.flatten() for c in got]))
    return rmse, rms


def golden_bound(
    rmse: float, native_rmse: float, rms: float, r: Tensor, *, gate: Mapping[str, Any], reference: str
) -> tuple[float, float]:
    """The error ratio against golden outputs, and the rmse that an artifact's gate allows.

    Args:
        rmse, native_rmse, rms: of one output, pooled where it is small.
        r: the golden output, for its dtype and its number of elements.
        gate, reference: of the manifest.
    """
    ratio, bound = judge_rmse(
        rmse, native_rmse, rms, dtype=r.dtype, num_elements=r.numel(), error_ratio_max=gate["error_ratio_max"]
    )
    if reference == "eager":
        bound = max(bound, EAGER_REFERENCE_TOL * rms, 4 * torch.finfo(r.dtype).eps * rms)
    return ratio, bound


def golden_problem(r: Tensor, c: Tensor, rmse: float, bound: float, ratio: float, *, reference: str) -> str | None:
    """What the gate finds wrong with an answer, beside the golden output; None where it passes.

    Args:
        r, c: golden output and answer, without an `exact_problem`.
        rmse, bound, ratio: of `golden_bound`, with what was given to it.
        reference: of the manifest; where it is eager, the bounds of OpenVINO's output validation do as well.
    """
    if rmse <= bound or (reference == "eager" and openvino_problem(*parts(r, c)[0], r.dtype) is None):
        return None
    return f"rmse {rmse:.3g} > {bound:.3g} (error_ratio {ratio:.3g})"
