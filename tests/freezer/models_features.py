"""FEATURES: a tiny model for every row of "Features" in docs/what-freezes.md."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import Tensor, library, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from freezer.spec.inputs import Dim
from tests.freezer.cases import DIFFERS, DIFFERS_LATER, FIXED, Case
from tests.models import Calling, Counter, ReassignedCounter
from tests.steps import BATCH, random_inputs

X = random_inputs(2, 4)
WIDE = random_inputs(2, 64)
IMAGE = random_inputs(2, 3, 8, 8)
SEQUENCE = random_inputs(2, 5, 8)
SIZE = Dim(name="size", min=4, max=12)
QUANTIZED = "quantized layers .*; freeze the float model, or quantize it with torchao"


class Layers(nn.Module):
    """Layers that run one after the other, then a function of their result."""

    def __init__(self, *layers: nn.Module, then: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.layers, self.then = nn.ModuleList(layers), then

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.then(x)


def linear_then(function: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: Layers(nn.Linear(4, 4), then=function).eval()


class StaysInTraining(nn.Module):
    """Keeps its batch norm in training mode: the answer depends on the batch, and each call counts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def train(self, mode: bool = True) -> StaysInTraining:
        super().train(mode)
        self.norm.train()
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.conv(x))
        return out


class Tied(nn.Module):
    """An embedding whose table is also the weight of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 64), nn.Linear(64, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(ids))
        return out


class Buffers(nn.Module):
    """A saved buffer, an unsaved one, and a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor = nn.Buffer(torch.full((4,), 3.0))
        self.shift: Tensor = nn.Buffer(torch.full((4,), 5.0), persistent=False)
        self.plain = torch.full((4,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.plain + self.shift


class Sliced(nn.Module):
    """Weights that are small views of large storages, and two views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(8, 8)
        self.weight = nn.Parameter(torch.randn(1000, 1000)[:4, :4])
        self.alone: Tensor = nn.Buffer(torch.randn(1000, 1000)[:4, :4])
        self.upper: Tensor = nn.Buffer(whole[:4, :4])
        self.lower: Tensor = nn.Buffer(whole[2:6, 2:6])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + x @ self.alone + x @ self.upper + x @ self.lower


class Shown(nn.Module):
    """Writes into a buffer; a second buffer is a view of its first rows."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.zeros(8, 4)
        self.whole, self.head = nn.Buffer(whole), nn.Buffer(whole[:2])

    def forward(self, x: Tensor) -> Tensor:
        self.whole.add_(x.sum(0))
        return x + self.head


class UnusualWeights(nn.Module):
    """Weights made in inference mode, without gradients, and with strides of 0."""

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.linear = nn.Linear(4, 4)
        self.fixed = nn.Linear(4, 4).requires_grad_(False)
        self.expanded = nn.Parameter(torch.randn(1, 4).expand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.fixed(self.linear(x)), self.expanded)


class Locked(nn.Module):
    """Holds a lock, which cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lock = nn.Linear(4, 4), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


class SparseWeights(nn.Module):
    """A sparse weight in COO layout, and one in CSR layout."""

    def __init__(self) -> None:
        super().__init__()
        self.coo: Tensor = nn.Buffer(torch.eye(4).mul(2).to_sparse())
        self.csr: Tensor = nn.Buffer(torch.eye(4).mul(2).to_sparse_csr())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.sparse.mm(self.csr, torch.sparse.mm(self.coo, x.t())).t()
        return out


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Layers(nn.Linear(4, 4)).eval()


def normed_by_hooks() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return Layers(nn.utils.weight_norm(nn.Linear(4, 4)), nn.utils.spectral_norm(nn.Linear(4, 4))).eval()


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def parametrized() -> nn.Module:
    own = nn.Linear(4, 4)
    parametrize.register_parametrization(own, "weight", Symmetric())
    return Layers(parametrizations.weight_norm(nn.Linear(4, 4)), parametrizations.spectral_norm(nn.Linear(4, 4)), own).eval()


def channels_last() -> nn.Module:
    conv = nn.Conv2d(3, 4, 3)
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    return Layers(conv, nn.ReLU()).eval()


class MaxNorm(nn.Module):
    """An embedding that normalizes its table in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4, max_norm=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.table(ids)
        return out


class Optionals(nn.Module):
    """An optional input that is not given, and an output that is None."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return (x * 2, None) if bias is None else (x * 2 + bias, bias)


class Choosing(nn.Module):
    """Takes int64, uint8, bool and float inputs."""

    def forward(self, ids: Tensor, pixels: Tensor, keep: Tensor, x: Tensor) -> Tensor:
        return torch.where(keep, x, torch.zeros_like(x)) + ids + pixels.float() / 255


class ReturnsWeights(nn.Module):
    """Returns its own parameter and buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.scale: Tensor = nn.Buffer(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * self.weight, self.weight, self.scale


def structures(y: Tensor) -> dict[str, Any]:
    return {"b": [y, (y.sum(),)], "a": (y.argmax(1), y > 0), "kind": "scores", "n": 3, "none": None}


def views(y: Tensor) -> tuple[Tensor, ...]:
    twice = y * 2
    return y.t(), y[:, ::2], y.expand(3, 2, 4), twice, twice


def in_place(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.clone()
    y[:, 1:].mul_(3)
    row = y[0]
    row.add_(1)
    return y, row


class Autocast(nn.Module):
    """Autocast around a layer, and around a product that is cast back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, product = self.linear(x), x @ x.t()
        return y, product.float() + 1


def complex_inside(x: Tensor) -> tuple[Tensor, Tensor]:
    z = torch.complex(x, x * 2)
    return (z * z.conj()).real + z.abs(), z.conj()


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.wide(self.narrow(x.bfloat16()).float())
        return out


def dynamic_quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = torch.ao.quantization.quantize_dynamic(Layers(nn.Linear(4, 4), nn.ReLU()).eval(), {nn.Linear})
        return model


def fx_prepared() -> nn.Module:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_fx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = prepare_fx(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), get_default_qconfig_mapping("x86"), (X,))
        model(X)
        return model


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = self.attention(x, x, x)
        return out


class Encoder(nn.Module):
    """With a padding mask, eager uses nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        out: Tensor = self.encoder(x, src_key_padding_mask=padding_mask)
        return out


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
        padded: Tensor = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0]
        return padded


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
        theta = torch.tensor([[1.0, 0.2, 0.0], [0.1, 1.0, 0.0]], dtype=x.dtype).expand(x.shape[0], 2, 3)
        return F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)


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


def conditional(x: Tensor) -> Tensor:
    out: Tensor = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))
    return out


library.define("coldpress_tests::doubled", "(Tensor x) -> Tensor")
library.impl("coldpress_tests::doubled", "CPU", lambda x: x * 2)
library.register_fake("coldpress_tests::doubled", lambda x: torch.empty_like(x))


def doubled(x: Tensor) -> Any:
    return torch.ops.coldpress_tests.doubled(x)


FEATURES: Mapping[str, Case] = {
    # Modes, weights and state
    "dropout and batch norm layers": Case(
        make=lambda: Layers(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)).eval(), inputs={"x": IMAGE}
    ),
    "`F.dropout` without `training=`, `torch.rand`": Case(make=lambda: Calling(lambda x: F.dropout(x, 0.5))),
    "batch norm without running statistics": Case(
        make=lambda: Layers(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)).eval(), inputs={"x": IMAGE}
    ),
    "a submodule that stays in training mode": Case(
        make=StaysInTraining,
        inputs={"x": IMAGE},
        says="a batch norm runs in training mode, .*; put it into eval mode, or give it track_running_stats=False",
        exported=r"a call changes model\.norm\.num_batches_tracked, .*; torchscript-frozen keeps state",
    ),
    "tied weights": Case(make=Tied, inputs={"ids": torch.arange(10).reshape(2, 5)}),
    "buffers (persistent or not), tensors as plain attributes": Case(make=Buffers),
    "weights that are views of a larger storage": Case(make=Sliced),
    "weights made in inference mode, without gradients, or expanded (stride 0)": Case(make=UnusualWeights),
    "sparse weights (COO, CSR)": Case(make=SparseWeights, says="Inductor does not compile; use torchscript-frozen"),
    "attributes that cannot be copied (locks, files)": Case(make=Locked, says="cannot be copied, .* cannot pickle '_thread.lock'"),
    "weights on the meta device": Case(make=on_meta, inputs={"x": X}, says="on the meta device, without values; load the weights"),
    "lazy layers before their first call": Case(
        make=lambda: Layers(nn.LazyLinear(4)), inputs={"x": X}, says="of lazy layers, .*; call the model once before freezing"
    ),
    "`nn.utils.weight_norm`, `nn.utils.spectral_norm`": Case(make=normed_by_hooks),
    "parametrizations, of torch or custom": Case(make=parametrized),
    "weights in channels-last layout": Case(make=channels_last, inputs={"x": IMAGE}),
    "a buffer changed by a call": Case(make=Counter, says=r"a call changes model\.count, .*; torchscript-frozen keeps state"),
    "a buffer that is a view of another, changed by a call": Case(
        make=Shown, says="the trace differs from the model on input set 0|cannot tell which tensors a call changes"
    ),
    "an attribute replaced by every call": Case(make=ReassignedCounter, exported=DIFFERS_LATER),
    "an embedding with `max_norm`": Case(
        make=MaxNorm, inputs={"ids": torch.arange(10).reshape(2, 5)}, says=r"a call changes model\.table\.weight"
    ),
    # Inputs and results
    "sparse inputs": Case(
        make=lambda: Calling(lambda x: x.to_dense() * 2),
        inputs={"x": X.relu().to_sparse()},
        says=r"input 'x': got a torch\.sparse_coo tensor, expected a dense one; give \.to_dense\(\)",
    ),
    "example inputs in channels-last layout, or that require gradients": Case(
        make=lambda: Layers(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(),
        inputs={"x": IMAGE.to(memory_format=torch.channels_last).requires_grad_()},
    ),
    "integer, uint8 and bool inputs": Case(
        make=Choosing,
        inputs={"ids": torch.arange(8).reshape(2, 4), "pixels": (X.abs() * 50).to(torch.uint8), "keep": X > 0, "x": X},
        dims={name: {0: BATCH} for name in ("ids", "pixels", "keep", "x")},
    ),
    "optional inputs that are None, outputs that are None": Case(make=Optionals, inputs={"x": X, "bias": None}),
    "an empty batch": Case(make=linear_then(lambda y: y), inputs={"x": torch.zeros(0, 4)}),
    "results that nest dicts, lists, tuples, strings, numbers and None": Case(make=linear_then(structures)),
    "views as outputs, one tensor returned twice": Case(make=linear_then(views)),
    "an input, or a view of it, returned": Case(make=lambda: Calling(lambda x: (x, x[:, 1:], x.t(), x * 2))),
    "a parameter or buffer returned": Case(make=ReturnsWeights),
    "in-place operations on intermediates and their views": Case(make=linear_then(in_place)),
    "a sparse result": Case(
        make=linear_then(lambda y: y.relu().to_sparse()), says=r"expected a dense tensor on the CPU; return \.to_dense\(\)"
    ),
    "sparse tensors inside": Case(
        make=linear_then(lambda y: y.relu().to_sparse().to_dense()), says="Inductor does not compile; use torchscript-frozen"
    ),
    "results whose size depends on values (`nonzero`)": Case(make=lambda: Calling(lambda x: x[x > 0])),
    # Dtypes
    "float16": Case(make=lambda: Layers(nn.Linear(64, 64), nn.ReLU()).half(), inputs={"x": WIDE.half()}),
    "bfloat16": Case(make=lambda: Layers(nn.Linear(64, 64), nn.ReLU()).bfloat16(), inputs={"x": WIDE.bfloat16()}),
    "float64": Case(make=lambda: Layers(nn.Linear(64, 64), nn.ReLU()).double(), inputs={"x": WIDE.double()}),
    "complex64 or complex128 weights and inputs": Case(
        make=lambda: Layers(nn.Linear(4, 4, dtype=torch.complex64)),
        inputs={"x": torch.complex(X, X.flip(0))},
        says="a defect of AOTInductor; use torchscript-frozen",
    ),
    "complex numbers inside, a lazy conjugate as a result": Case(make=lambda: Calling(complex_inside)),
    "modules of several dtypes": Case(make=MixedDtypes),
    "autocast regions": Case(make=Autocast, inputs={"x": WIDE}),
    "dynamically quantized layers": Case(make=dynamic_quantized, inputs={"x": X}, says=QUANTIZED),
    "models prepared for quantization": Case(
        make=fx_prepared,
        inputs={"input": X},
        says="the trace would keep for all calls what Python reads of its inputs at a line of torch; use",
        exported="the model holds observers, .*; convert it",
    ),
    # Operations
    "`einsum`, FFT, `nn.EmbeddingBag`, `torch.vmap`, activation checkpointing": Case(
        make=Operations, inputs={"x": X, "ids": torch.arange(10).reshape(2, 5)}
    ),
    "`nn.LSTM`, `nn.GRU`": Case(make=Recurrent, inputs={"x": SEQUENCE}, dims={"x": {0: BATCH, 1: SIZE}}, exported=FIXED),
    "packed sequences": Case(
        make=Packed,
        inputs={"x": SEQUENCE, "lengths": torch.tensor([5, 3])},
        says="a size comes from the values of a tensor, .*; pass the padded batch",
    ),
    "`nn.MultiheadAttention`": Case(make=Attention, inputs={"x": SEQUENCE}, dims={"x": {0: BATCH}}),
    "`nn.TransformerEncoder` with a padding mask": Case(
        make=Encoder,
        inputs={"x": SEQUENCE, "padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])},
        exported=DIFFERS,
    ),
    "`scaled_dot_product_attention`": Case(
        make=lambda: Calling(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)),
        inputs={"x": random_inputs(2, 2, 5, 8)},
        dims={"x": {0: BATCH, 2: SIZE}},
    ),
    "`grid_sample`, `affine_grid`": Case(make=Sampled, inputs={"x": IMAGE}, dims={"x": {2: SIZE}}, exported=FIXED),
    "`interpolate`": Case(
        make=lambda: Calling(lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear")),
        inputs={"x": IMAGE},
        dims={"x": {2: SIZE}},
    ),
    "a custom operator with a fake kernel": Case(
        make=linear_then(doubled), says="the graph calls coldpress_tests::doubled, .*; write it in torch's operations"
    ),
    "`torch.cond`": Case(make=lambda: Calling(conditional), says=r"forward calls torch\.cond .*; use torch\.export"),
    "gradients inside `forward`": Case(
        make=Force,
        says=r"uses a tensor that requires grad .* at models_features\.py:.*grad\(energy, x\); register it",
        exported="forward computes gradients, .*; write the gradient in torch's operations",
    ),
}
