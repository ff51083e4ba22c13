"""Stable forms of operators, which exported programs get before an engine's converter sees them.

The converters write logarithms of sums out as they stand in a textbook: `log(sigmoid(x))` is -inf
from x = -16.7 down in ONNX Runtime, -87 in OpenVINO. And a row of an attention mask without keys,
for which eager gives zeros, becomes NaN or the average of all values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.nn import functional as F  # noqa: N812

aten = torch.ops.aten

_MEAN, _SUM = 1, 2
"""Numbers of reductions in ATen."""


def with_stable_forms(program: ExportedProgram) -> ExportedProgram:
    """The program with the operators of `_FORMS` in stable form; itself if it has none."""
    targets = {node.target for node in program.graph.nodes}
    if targets.isdisjoint(_FORMS):
        return program
    changed: ExportedProgram = program.run_decompositions(dict(_FORMS))
    return changed


def _log_sigmoid(x: Tensor) -> Tensor:
    return x.clamp(max=0) - _log1p(torch.exp(-x.abs()))


def _logaddexp(a: Tensor, b: Tensor) -> Tensor:
    apart = (a - b).abs()
    apart = torch.where(a == b, 0.0, apart)  # of equal infinities
    return torch.maximum(a, b) + _log1p(torch.exp(-apart))


def _log1p(x: Tensor) -> Tensor:
    """Kahan's form: the rounding of 1 + x cancels.

    Source: Goldberg, "What every computer scientist should know about floating-point arithmetic"
    (1991), theorem 4.
    """
    sum_ = 1 + x
    share = torch.where(sum_ == x, 1.0, x / (sum_ - 1))  # of large values, and of infinity
    return torch.where(sum_ == 1, x, torch.log(sum_) * share)


def _expm1(x: Tensor) -> Tensor:
    """By tanh(x / 2) = (exp(x) - 1) / (exp(x) + 1)."""
    return torch.tanh(x / 2) * (torch.exp(x) + 1)


def _bce_with_logits(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    positive = 1.0 if pos_weight is None else 1 + (pos_weight - 1) * target
    losses = (1 - target) * x - positive * _log_sigmoid(x)
    if weight is not None:
        losses = losses * weight
    if reduction == _MEAN:
        return losses.mean()
    return losses.sum() if reduction == _SUM else losses


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Attention whose mask leaves each row a key, with zeros in the rows that had none."""
    if attn_mask is None or attn_mask.dtype != torch.bool:
        return NotImplemented
    has_keys = attn_mask.any(-1, keepdim=True)
    added = torch.where(attn_mask | ~has_keys, 0.0, -torch.inf).to(q.dtype)
    attended = F.scaled_dot_product_attention(q, k, v, added, *args, **kwargs)
    return torch.where(has_keys, attended, 0.0)


_FORMS: dict[Any, Callable[..., Any]] = {
    aten.log_sigmoid.default: _log_sigmoid,
    aten.log_sigmoid_forward.default: lambda x: (_log_sigmoid(x), x),
    aten.logaddexp.default: _logaddexp,
    aten.log1p.default: _log1p,
    aten.expm1.default: _expm1,
    aten.binary_cross_entropy_with_logits.default: _bce_with_logits,
    aten.scaled_dot_product_attention.default: _attention,
}
