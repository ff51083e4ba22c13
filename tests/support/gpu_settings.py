"""The settings of this process for the precision of GPUs."""

from __future__ import annotations

from typing import Any

import torch


def settings_on_gpu() -> dict[str, Any]:
    """The float32 precision of each kind of operation, and whether half-precision sums are
    allowed.
    """
    found: dict[str, Any] = {
        name: torch._C._get_fp32_precision_getter("cuda", name)
        for name in ("matmul", "conv", "rnn")
    }
    for dtype in ("fp16", "bf16"):
        found[f"allow_{dtype}"] = getattr(
            torch._C, f"_get_cublas_allow_{dtype}_reduced_precision_reduction"
        )()
    return found
