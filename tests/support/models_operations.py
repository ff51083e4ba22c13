"""OPERATIONS: a tiny model for every row of "Operations" in docs/reference/what-freezes.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import Tensor, library, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from freezer.spec import Dim
from tests.support.cases import DIFFERS, FIXED, Case
from tests.support.models import Calling, linear_then
from tests.support.steps import BATCH, random_inputs

X = random_inputs(2, 4)
IMAGE = random_inputs(2, 3, 8, 8)
SEQUENCE = random_inputs(2, 5, 8)
SIZE = Dim(name="size", min=4, max=12)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention(x, x, x)


class Encoder(nn.Module):
    """With a padding mask, eager uses nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padding_mask)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 6, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Any:
        return self.rnn(x)


class Packed(nn.Module):
    """Packs sequences by their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 6, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = self.rnn(packed)
        return pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0]


class Operations(nn.Module):
    """Operations that every capture takes."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.linear = nn.EmbeddingBag(20, 4, mode="mean"), nn.Linear(4, 4)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        y = checkpoint(self.linear, x, use_reentrant=False)
        spectrum = torch.fft.irfft(torch.fft.rfft(x) * 2, n=x.shape[-1])
        return torch.einsum("bi,bj->bij", y, y), spectrum, torch.vmap(scaled_row)(x), self.bag(ids)


def scaled_row(row: Tensor) -> Tensor:
    return row.softmax(0) * row.sum()


class Sampled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        theta = torch.tensor([[1.0, 0.2, 0.0], [0.1, 1.0, 0.0]], dtype=x.dtype).expand(
            x.shape[0], 2, 3
        )
        return F.grid_sample(
            x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False
        )


class Force(nn.Module):
    """The gradient of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.linear(x).square().sum()
            (force,) = torch.autograd.grad(energy, x)
        return force


def attended_and_resized(x: Tensor) -> tuple[Tensor, Tensor]:
    attended = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    return attended, F.interpolate(x, scale_factor=2.0, mode="bilinear")


def conditional(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))


library.define("coldpress_tests::doubled", "(Tensor x) -> Tensor")
library.impl("coldpress_tests::doubled", "CPU", lambda x: x * 2)
library.register_fake("coldpress_tests::doubled", lambda x: torch.empty_like(x))


def doubled(x: Tensor) -> Any:
    return torch.ops.coldpress_tests.doubled(x)


OPERATIONS: Mapping[str, Case] = {
    "`einsum`, FFT, `nn.EmbeddingBag`, `torch.vmap`, activation checkpointing": Case(
        make=Operations, inputs={"x": X, "ids": torch.arange(10).reshape(2, 5)}
    ),
    "`nn.LSTM`, `nn.GRU`": Case(
        make=Recurrent, inputs={"x": SEQUENCE}, dims={"x": {0: BATCH, 1: SIZE}}, exported=FIXED
    ),
    "packed sequences": Case(
        make=Packed,
        inputs={"x": SEQUENCE, "lengths": torch.tensor([5, 3])},
        says="a size comes from the values of a tensor, .*; pass the padded batch",
    ),
    "`nn.MultiheadAttention`": Case(make=Attention, inputs={"x": SEQUENCE}, dims={"x": {0: BATCH}}),
    "`nn.TransformerEncoder` with a padding mask": Case(
        make=Encoder,
        inputs={
            "x": SEQUENCE,
            "padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2]),
        },
        exported=DIFFERS,
    ),
    "`scaled_dot_product_attention`, `interpolate`": Case(
        make=lambda: Calling(attended_and_resized),
        inputs={"x": random_inputs(2, 2, 5, 8)},
        dims={"x": {0: BATCH, 2: SIZE}},
    ),
    "`grid_sample`, `affine_grid`": Case(
        make=Sampled, inputs={"x": IMAGE}, dims={"x": {2: SIZE}}, exported=FIXED
    ),
    "a custom operator with a fake kernel": Case(
        make=linear_then(doubled),
        says="the graph calls coldpress_tests::doubled, .*; write it in torch's operations",
    ),
    "`torch.cond`": Case(
        make=lambda: Calling(conditional), says=r"forward calls torch\.cond .*; use torch\.export"
    ),
    "gradients inside `forward`": Case(
        make=Force,
        says=(
            r"uses a tensor that requires grad .* at models_operations\.py:.*grad\(energy, x\);"
            r" register it"
        ),
        exported="forward computes gradients, .*; write the gradient in torch's operations",
    ),
}
