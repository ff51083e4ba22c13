"""Digests of weights of every layout."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from freezer.freezing.models import weights_digest

EYE = torch.eye(4)


@pytest.mark.parametrize(
    "layout",
    [
        lambda dense: dense.to_sparse(),
        lambda dense: dense.to_sparse_csr(),
        lambda dense: dense.to_sparse_bsc((2, 2)),
        lambda dense: torch.quantize_per_tensor(dense, 0.5, 1, torch.qint8),
        lambda dense: torch.quantize_per_channel(dense, EYE[0] + 1, torch.zeros(4), 0, torch.qint8),
        lambda dense: torch.complex(dense, dense).conj(),
    ],
)
def test_weights_digest_depends_on_content(layout: Any) -> None:
    def digest(dense: torch.Tensor) -> str:
        model = nn.Module()
        with warnings.catch_warnings():  # of layouts in beta
            warnings.simplefilter("ignore", UserWarning)
            model.register_buffer("weight", layout(dense))
        return weights_digest(model)

    assert digest(EYE) == digest(EYE)
    assert digest(EYE) != digest(EYE * 2)
