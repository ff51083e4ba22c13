"""How far two answers to the same inputs are from each other, and how far the gate lets one be from the golden outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

POOL_BELOW = 64

_HALVES = (torch.float16, torch.bfloat16)

SMALL_TENSOR = 1000
"""Elements below which dynamo's `same()` takes the larger multiplier."""

GAP = 0.1
"""Of what the tolerance would allow: values apart by more hide the lesser ones' errors in the greater ones' rms."""

_OPENVINO: Mapping[str, tuple[float, float, float]] = {
    "float32": (0.999, 1e-4, 1e-3),
    "float16": (0.995, 1e-2, 5e-2),
    "bfloat16": (0.99, 2e-2, 1e-1),
}
"""Least cosine, and absolute and relative error of which one must hold, by dtype."""


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


def parts_of(r: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Masks of the elements that are judged apart: one of all, or one of the lesser and one of the greater magnitudes.

    They are apart where the least of the greater is so much above the greatest of the lesser that the tolerance of the whole, as a
    part of its rms, is a tenth of the lesser ones; those must be at least two, and 64 or a tenth of all, so that values that are
    zero but for rounding make no part.

    Args:
        r: the reference, flat and finite.
        dtype: of the output.
    """
    sizes = r.abs()
    binades = torch.frexp(sizes[sizes > 0]).exponent  # 2 ** (b - 1) <= size < 2 ** b
    lowest = int(binades.min()) if binades.numel() else 0
    counts = torch.bincount((binades - lowest).long()).tolist()
    least = max(2, min(POOL_BELOW, math.ceil(binades.numel() / 10)))
    wide = math.ceil(math.log2(GAP / (_tolerance(dtype) / 10)))
    below = empty = 0
    for place, count in enumerate(counts):
        if count and empty >= wide and below >= least:
            greater = sizes >= 2.0 ** (lowest + place - 1)
            return [~greater, greater]
        below, empty = below + count, 0 if count else empty + 1
    return [torch.ones_like(sizes, dtype=torch.bool)]


def judge_rmse(
    rmse: float, native_rmse: float, rms: float, *, dtype: torch.dtype, num_elements: int, error_ratio_max: float
) -> tuple[float, float]:
    """The error ratio, and the rmse that would just pass the gate. The canary applies this very formula.

    Args:
        rmse, native_rmse, rms: of one output, pooled where it is small.
        dtype: of the output.
        num_elements: of the output in one set.
        error_ratio_max: the gate.
    """
    eps = torch.finfo(dtype).eps
    floor = max(native_rmse, eps * rms)
    ratio = rmse / floor if floor > 0 else (0.0 if rmse == 0 else math.inf)
    multiplier = 3.0 if dtype in _HALVES or num_elements < SMALL_TENSOR else 2.0
    return ratio, max(error_ratio_max * floor, multiplier * native_rmse + _tolerance(dtype) * rms / 10)


def _tolerance(dtype: torch.dtype) -> float:
    """How far an output may be off, as a part of its rms: that of dynamo's benchmarks."""
    return 1e-2 if dtype in _HALVES else 1e-4 * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps


def comparable(tensor: Tensor) -> bool:
    """Whether an output has rounding errors; integers and bools must be equal."""
    return tensor.is_floating_point() or tensor.is_complex()


def in_double(tensor: Tensor) -> Tensor:
    """The tensor in float64, or in complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def square_sum(tensor: Tensor) -> float:
    """The sum of squared magnitudes."""
    return float((tensor.abs() ** 2).sum())


def error_figures(r: Tensor, c: Tensor, *, eps: float) -> dict[str, Any]:
    """The figures of docs/measuring.md for a reference `r` and an output `c`, flat, finite and in double precision."""
    count = max(r.numel(), 1)
    error = (c - r).abs()
    signal, noise, power = square_sum(r), square_sum(c - r), square_sum(c)
    inner = float((c * r.conj()).sum().real)
    largest = torch.maximum(torch.maximum(c.abs(), r.abs()), torch.full_like(error, eps))
    return {
        "max_abs_err": float(error.max()) if r.numel() else 0.0,
        "max_rel_err": float((error / largest).max()) if r.numel() else 0.0,
        "rmse": math.sqrt(noise / count),
        "rms": math.sqrt(signal / count),
        "sqnr_db": 10 * math.log10(signal / noise) if noise > 0 and signal > 0 else None,
        "cosine": inner / math.sqrt(signal * power) if signal > 0 and power > 0 else None,
        "gain": inner / signal if signal > 0 else None,
    }


def openvino_problem(r: Tensor, c: Tensor, dtype: torch.dtype) -> str | None:
    """What OpenVINO's output validation would find wrong; the canary applies this to outputs whose reference was eager.

    Args:
        r, c: golden output and answer, flat, finite, in double precision.
        dtype: of the output.
    """
    return openvino_bounds_problem(dtype, error_figures(r, c, eps=torch.finfo(dtype).eps))


def openvino_bounds_problem(dtype: torch.dtype, figures: Mapping[str, Any]) -> str | None:
    """Why `error_figures` exceed the bounds of OpenVINO's output validation for a dtype; None where they do not."""
    name = str(dtype).removeprefix("torch.")
    least_cosine, absolute, relative = _OPENVINO.get(name, _OPENVINO["float32"])
    cosine, abs_err, rel_err = figures["cosine"], figures["max_abs_err"], figures["max_rel_err"]
    if abs_err == 0:
        return None
    if cosine is None or cosine < least_cosine:
        return f"cosine {cosine} < {least_cosine} ({name}, the reference is eager)"
    if abs_err > absolute and rel_err > relative:
        errors = f"max_abs_err {abs_err:.3g} > {absolute:g} and max_rel_err {rel_err:.3g} > {relative:g}"
        return f"{errors} ({name}, the reference is eager)"
    return None
