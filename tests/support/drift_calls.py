"""Calls with outputs of known drift, and their assessment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from freezer.freezing.drift import Call, DriftReport, Gate, assess, report
from freezer.freezing.drift.reference import scales_of


def call(r: Any, e: Any, c: Any, *, index: int = 0, noise: float = 0.0) -> Call:
    def leaves(given: Any) -> list[Tensor]:
        return list(given) if isinstance(given, list) else [given]

    return Call(
        kind="single",
        set_index=index,
        reference=leaves(r),
        eager=leaves(e),
        candidate=leaves(c),
        noise_rmse=[noise] * len(leaves(e)),
    )


def drift(
    *calls: Call, limit: float = 3.0, float64: bool = True, names: tuple[str, ...] = ("out",)
) -> DriftReport:
    gate = Gate(error_ratio_max=limit, float64=float64)
    scales = [scales_of(calls, index, float64=float64) for index in range(len(names))]
    return report(assess(names, iter(calls), gate, scales), gate)


def rounded(size: int, native: float, candidate: float) -> tuple[Tensor, Tensor, Tensor]:
    """A reference, and two float32 outputs that are off by `native` and by `candidate` in every
    element.
    """
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(size)[:size]
    r = 1 + torch.arange(size, dtype=torch.float64) / size
    return r, (r + signs * native).float(), (r + signs * candidate).float()
