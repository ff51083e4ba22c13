"""How far two answers to the same inputs are from each other, and how far the gate lets one be from the golden outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from freezer.drift import judge_rmse

EAGER_REFERENCE_TOL = 1e-3
"""Relative error of outputs whose reference was eager: OpenVINO's bound for float32; lower precisions get theirs by dtype."""


def comparable(tensor: Tensor) -> bool:
    """Whether an output has rounding errors; integers and bools must be equal."""
    return tensor.is_floating_point() or tensor.is_complex()


def exact_problem(r: Tensor, c: Tensor) -> str | None:
    """What differs in what must be the same exactly: shape, dtype, integers, the places of NaN and Inf."""
    if r.shape != c.shape or r.dtype != c.dtype:
        return f"got {c.dtype} {list(c.shape)}, expected {r.dtype} {list(r.shape)}"
    if not comparable(r):
        wrong = int((r != c).sum())
        return f"{wrong} of {r.numel()} elements differ" if wrong else None
    infinite = r.isinf()
    if not torch.equal(r.isnan(), c.isnan()) or not torch.equal(infinite, c.isinf()) or not torch.equal(r[infinite], c[infinite]):
        return "NaN or Inf at other places"
    return None


def errors(r: Tensor, c: Tensor) -> tuple[float, float, float]:
    """rmse, rms of the reference, and the largest absolute error, over finite elements."""
    finite = r.isfinite() & c.isfinite()
    r64, c64 = (tensor[finite].to(torch.complex128 if r.is_complex() else torch.float64) for tensor in (r, c))
    count = max(r64.numel(), 1)
    error = (c64 - r64).abs()
    worst = float(error.max()) if error.numel() else 0.0
    return math.sqrt(float((error**2).sum()) / count), math.sqrt(float((r64.abs() ** 2).sum()) / count), worst


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
