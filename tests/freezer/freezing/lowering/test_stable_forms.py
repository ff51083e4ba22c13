"""Operators that engines compute wrong at extreme values get a stable form before conversion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tests.support.models import Calling
from tests.support.steps import candidate_of, judgement_of, subject_of

X = torch.tensor([[-100.0, -87.5, -20.0, -3.0, -1e-6, 0.0, 1e-6, 2.0, 30.0, 500.0]] * 2)
MASK = torch.tensor([[True, True, False, False], [False, False, False, False]])


def attend(x: Tensor) -> Tensor:
    q = x[:, None, :8].unflatten(2, (4, 2))
    return F.scaled_dot_product_attention(q, q, q, attn_mask=MASK[:, None, None])


@pytest.mark.parametrize("recipe", ["onnxruntime", "openvino"])
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(F.logsigmoid, id="log_sigmoid"),
        pytest.param(lambda x: torch.logaddexp(x, x.flip(1)), id="logaddexp"),
        pytest.param(lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid()), id="bce"),
        pytest.param(lambda x: torch.log1p(x.abs()), id="log1p"),
        pytest.param(lambda x: torch.expm1(x.clamp(max=1)), id="expm1"),
        pytest.param(attend, id="masked attention"),
    ],
)
def test_engines_are_right_at_extremes(
    recipe: str, function: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    subject = subject_of(Calling(function), {"x": X})
    found = judgement_of(subject, [candidate_of(subject, recipe, tmp_path / "made")])
    assert found.trials[0].problem is None
