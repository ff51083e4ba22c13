"""Bytes of tensors of every layout, and digests of weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from freezer.freezing.models import weights_digest
from freezer.runtime.tensors import dense_parts, same_bytes

EYE = torch.eye(4)


def converted(kind: str, dense: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # of sparse layouts in beta, and of quantized tensors
        make: dict[str, Callable[[], Any]] = {
            "dense": lambda: dense.clone(),
            "coo": lambda: dense.to_sparse(),
            "csr": lambda: dense.to_sparse_csr(),
            "csc": lambda: dense.to_sparse_csc(),
            "bsr": lambda: dense.to_sparse_bsr((2, 2)),
            "bsc": lambda: dense.to_sparse_bsc((2, 2)),
            "quantized": lambda: torch.quantize_per_tensor(dense, 0.5, 1, torch.qint8),
            "per-channel": lambda: torch.quantize_per_channel(
                dense, EYE[0] + 1, torch.zeros(4), 0, torch.qint8
            ),
            "conj": lambda: torch.complex(dense, dense).conj(),
            "packed": lambda: (dense.clone(), None),
        }
        return make[kind]()


KINDS = ("dense", "coo", "csr", "csc", "bsr", "bsc", "quantized", "per-channel", "conj", "packed")


@pytest.mark.parametrize("kind", KINDS)
def test_same_bytes_for_every_layout(kind: str) -> None:
    assert same_bytes(converted(kind, EYE), converted(kind, EYE))
    assert not same_bytes(converted(kind, EYE), converted(kind, EYE * 2))
    assert all(
        part.layout is torch.strided and not part.is_quantized
        for part in dense_parts(converted(kind, EYE))
    )


def test_same_bytes_compares_bits() -> None:
    assert same_bytes(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert not same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bytes(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not same_bytes(torch.zeros(2), torch.zeros(1, 2))
    assert list(dense_parts({"no": "tensor"})) == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "packed"])
def test_weights_digest_depends_on_content(kind: str) -> None:
    def holder(dense: torch.Tensor) -> nn.Module:
        model = nn.Module()
        model.register_buffer("weight", converted(kind, dense))
        return model

    assert weights_digest(holder(EYE)) == weights_digest(holder(EYE))
    assert weights_digest(holder(EYE)) != weights_digest(holder(EYE * 2))
