"""A tiny model for every feature of docs/what-freezes.md, by the name of its row."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everyone writes it
from torch import Tensor, library, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from freezer.spec.inputs import Dim
from tests.freezer.cases import DIFFERS, DIFFERS_LATER, FIXED, Case
from tests.models import Calling, Counter, ReassignedCounter
from tests.steps import BATCH, random_inputs

X = random_inputs(2, 4)
IMAGE = random_inputs(2, 3, 8, 8)
SEQUENCE = random_inputs(2, 5, 8)
SIZE = Dim(name="size", min=4, max=12)


def weighted(function: Callable[[Tensor], Any], *layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: Weighted(function, layers or (nn.Linear(4, 4),))


class Weighted(nn.Module):
    """Layers that run one after the other, and a function of what they give."""

    def __init__(self, function: Callable[[Tensor], Any], layers: tuple[nn.Module, ...]) -> None:
        super().__init__()
        self.layers, self.function = nn.Sequential(*layers), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layers(x))


class Layers(nn.Sequential):
    """Layers that run one after the other; its input is called x."""

    def forward(self, x: Tensor) -> Any:
        for layer in self:
            x = layer(x)
        return x


def layers(*parts: nn.Module) -> nn.Module:
    return Layers(*parts).eval()


# Layers that act otherwise in training


class AlwaysDropping(nn.Module):
    """Forgets to pass `training=self.training`, which is True by default."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)


class ForgottenNorm(nn.Module):
    """Keeps a batch norm in training mode, whatever mode it is put into: it answers by its batch and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def train(self, mode: bool = True) -> ForgottenNorm:
        super().train(mode)
        self.norm.train()
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.conv(x))
        return out


# Weights and buffers


class Tied(nn.Module):
    """An embedding whose table is the weight of the last layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 64), nn.Linear(64, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(ids))
        return out


class Buffers(nn.Module):
    """One buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor = nn.Buffer(torch.full((4,), 3.0))
        self.shift: Tensor = nn.Buffer(torch.full((4,), 5.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class TensorAttribute(nn.Module):
    """A tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.full((4,), 3.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Sliced(nn.Module):
    """Weights that are small views of large storages, and two of one."""

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
    """Writes into a buffer of which another shows the first rows."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.zeros(8, 4)
        self.whole, self.head = nn.Buffer(whole), nn.Buffer(whole[:2])

    def forward(self, x: Tensor) -> Tensor:
        self.whole.add_(x.sum(0))
        return x + self.head


class Expanded(nn.Module):
    """A weight whose strides are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 4).expand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Locked(nn.Module):
    """Holds what nothing copies."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lock = nn.Linear(4, 4), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


class SparseWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight: Tensor = nn.Buffer(torch.eye(4).mul(2).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.sparse.mm(self.weight, x.t()).t()
        return out


def sparse_csr_weight() -> nn.Module:
    model = SparseWeight()
    model.weight = torch.eye(4).mul(2).to_sparse_csr()
    return model


class InferenceWeights(nn.Module):
    """A weight that was made in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return layers(nn.Linear(4, 4))


def lazy() -> nn.Module:
    return Layers(nn.LazyLinear(4))


def lazy_but_called() -> nn.Module:
    model = Layers(nn.LazyLinear(4))
    model(X)
    return model


def weight_normed() -> nn.Module:
    return layers(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))


def weight_normed_by_hook() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return layers(nn.utils.weight_norm(nn.Linear(4, 4)))


def spectral_normed() -> nn.Module:
    return layers(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))


def spectral_normed_by_hook() -> nn.Module:
    return layers(nn.utils.spectral_norm(nn.Linear(4, 4)))


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def parametrized() -> nn.Module:
    model = nn.Linear(4, 4)
    parametrize.register_parametrization(model, "weight", Symmetric())
    return layers(model)


# Inputs and outputs


class Optionals(nn.Module):
    """An optional input that is not given, and an output that is None."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return (x * 2, None) if bias is None else (x * 2 + bias, bias)


class Choosing(nn.Module):
    """Integer, bool and float inputs together."""

    def forward(self, ids: Tensor, keep: Tensor, x: Tensor) -> Tensor:
        return torch.where(keep, x, torch.zeros_like(x)) + ids


class Parameter(nn.Module):
    """Gives its own parameter and buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.scale: Tensor = nn.Buffer(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * self.weight, self.weight, self.scale


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = 0
    y[:, 1:].mul_(3)
    return y.add_(1)


def autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.t()
    return y.float() + 1


class AutocastLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out: Tensor = self.linear(x)
        return out


def complex_inside(x: Tensor) -> Tensor:
    z = torch.complex(x, x * 2)
    return (z * z.conj()).real + z.abs()


def spectrum(x: Tensor) -> Tensor:
    out: Tensor = torch.fft.irfft(torch.fft.rfft(x) * 2, n=x.shape[-1])
    return out


# Quantization


def dynamic_quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = torch.ao.quantization.quantize_dynamic(Layers(nn.Linear(4, 4), nn.ReLU()).eval(), {nn.Linear})
        return model


def fx_quantized(*, converted: bool) -> nn.Module:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = prepare_fx(Layers(nn.Linear(4, 4), nn.ReLU()).eval(), get_default_qconfig_mapping("x86"), (X,))
        model(X)
        return convert_fx(model) if converted else model


# Operations


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = self.attention(x, x, x)
        return out


class Encoder(nn.Module):
    """With a padding mask, eager takes the path of nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        out: Tensor = self.encoder(x, src_key_padding_mask=padding_mask)
        return out


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.rnn = kind(8, 6, num_layers=2, batch_first=True, bidirectional=True)

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


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 8, mode="mean")

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.bag(ids)
        return out


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.linear, x, use_reentrant=False)
        return out


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.wide(self.narrow(x.bfloat16()).float())
        return out


class Sampled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        theta = torch.tensor([[1.0, 0.2, 0.0], [0.1, 1.0, 0.0]], dtype=x.dtype).expand(x.shape[0], 2, 3)
        return F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)


def channels_last() -> nn.Module:
    conv = nn.Conv2d(3, 4, 3)
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    return layers(conv, nn.ReLU())


class MaxNorm(nn.Module):
    """An embedding that brings its table to a norm with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4, max_norm=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.table(ids)
        return out


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


def scaled_row(row: Tensor) -> Tensor:
    return row.softmax(0) * row.sum()


def doubled(x: Tensor) -> Any:
    return torch.ops.coldpress_tests.doubled(x)


FEATURES: Mapping[str, Case] = {
    # Layers that act otherwise in training
    "dropout layer": Case(make=lambda: layers(nn.Linear(4, 4), nn.Dropout(0.5))),
    "`F.dropout` without `training=`": Case(make=AlwaysDropping),
    "batch norm": Case(make=lambda: layers(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), inputs={"x": IMAGE}),
    "batch norm without running statistics": Case(
        make=lambda: layers(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)), inputs={"x": IMAGE}
    ),
    "a submodule that keeps itself in training mode": Case(
        make=ForgottenNorm,
        inputs={"x": IMAGE},
        says="a batch norm runs in training mode, .*; put it into eval mode, or give it track_running_stats=False",
        exported=r"a call changes model\.norm\.num_batches_tracked, .*; torchscript-frozen keeps state",
    ),
    # Weights
    "tied weights": Case(make=Tied, inputs={"ids": torch.arange(10).reshape(2, 5)}),
    "buffers, persistent or not": Case(make=Buffers),
    "a tensor as a plain attribute": Case(make=TensorAttribute),
    "weights that are views of a larger storage": Case(make=Sliced),
    "expanded weights (stride 0)": Case(make=Expanded),
    "sparse weights (COO)": Case(make=SparseWeight, says="Inductor does not compile; torchscript-frozen takes them"),
    "sparse weights (CSR)": Case(make=sparse_csr_weight, says="Inductor does not compile; torchscript-frozen takes them"),
    "weights made in inference mode": Case(make=InferenceWeights),
    "weights without gradients": Case(make=lambda: layers(nn.Linear(4, 4)).requires_grad_(False), inputs={"x": X}),
    "attributes that cannot be copied (locks, files)": Case(make=Locked, says="cannot be copied, .* cannot pickle '_thread.lock'"),
    "weights on the meta device": Case(make=on_meta, inputs={"x": X}, says="on the meta device, without values; load the weights"),
    "lazy layers before their first call": Case(
        make=lazy, inputs={"x": X}, says="of lazy layers, .*; call the model once before freezing"
    ),
    "lazy layers after it": Case(make=lazy_but_called, inputs={"x": X}),
    "`parametrizations.weight_norm`": Case(make=weight_normed, inputs={"x": X}),
    "`nn.utils.weight_norm`": Case(make=weight_normed_by_hook, inputs={"x": X}),
    "`parametrizations.spectral_norm`": Case(make=spectral_normed, inputs={"x": X}),
    "`nn.utils.spectral_norm`": Case(make=spectral_normed_by_hook, inputs={"x": X}),
    "a parametrization of one's own": Case(make=parametrized, inputs={"x": X}),
    "weights in channels-last layout": Case(make=channels_last, inputs={"x": IMAGE}),
    "a buffer that a call changes": Case(make=Counter, says=r"a call changes model\.count, .*; torchscript-frozen keeps state"),
    "a buffer that shows a part of another, which a call changes": Case(
        make=Shown, says="the trace differs from the model on input set 0|cannot tell which tensors a call changes"
    ),
    "an attribute that every call replaces": Case(make=ReassignedCounter, exported=DIFFERS_LATER),
    "an embedding with `max_norm`": Case(
        make=MaxNorm, inputs={"ids": torch.arange(10).reshape(2, 5)}, says=r"a call changes model\.table\.weight"
    ),
    # Inputs and outputs
    "sparse inputs": Case(
        make=lambda: Calling(lambda x: x.to_dense() * 2),
        inputs={"x": X.relu().to_sparse()},
        says=r"input 'x': got a torch\.sparse_coo tensor, expected a dense one; give \.to_dense\(\)",
    ),
    "inputs in channels-last layout": Case(
        make=lambda: layers(nn.Conv2d(3, 4, 3), nn.ReLU()), inputs={"x": IMAGE.to(memory_format=torch.channels_last)}
    ),
    "example inputs that require gradients": Case(make=lambda: layers(nn.Linear(4, 4)), inputs={"x": X.clone().requires_grad_()}),
    "integer and bool inputs": Case(
        make=Choosing,
        inputs={"ids": torch.arange(8).reshape(2, 4), "keep": X > 0, "x": X},
        dims={name: {0: BATCH} for name in ("ids", "keep", "x")},
    ),
    "uint8 inputs": Case(make=lambda: Calling(lambda x: x.float() / 255), inputs={"x": (X.abs() * 50).to(torch.uint8)}),
    "optional inputs that are None, outputs that are None": Case(make=Optionals, inputs={"x": X, "bias": None}),
    "an empty batch": Case(make=lambda: layers(nn.Linear(4, 4)), inputs={"x": torch.zeros(0, 4)}),
    "outputs without dims": Case(make=weighted(lambda y: y.sum())),
    "integer outputs": Case(make=weighted(lambda y: (y.argmax(1), y > 0))),
    "strings, numbers and None in the result": Case(make=weighted(lambda y: {"y": y, "kind": "scores", "n": 3, "none": None})),
    "dicts, lists and tuples as results": Case(make=weighted(lambda y: {"b": [y, (y + 1,)], "a": y * 2})),
    "views as outputs": Case(make=weighted(lambda y: (y.t(), y[:, ::2], y.expand(3, 2, 4)))),
    "one tensor returned twice": Case(make=weighted(twice)),
    "an input returned as an output": Case(make=lambda: Calling(lambda x: (x, x * 2))),
    "a view of an input returned": Case(make=lambda: Calling(lambda x: (x[:, 1:], x.t()))),
    "a parameter or buffer returned": Case(make=Parameter),
    "in-place operations on intermediates": Case(make=weighted(in_place)),
    "a sparse result": Case(
        make=weighted(lambda y: y.relu().to_sparse()), says=r"expected a dense tensor on the CPU; return \.to_dense\(\)"
    ),
    "sparse tensors inside": Case(
        make=weighted(lambda y: y.relu().to_sparse().to_dense()), says="Inductor does not compile; torchscript-frozen takes them"
    ),
    "results whose size depends on values (`nonzero`)": Case(make=lambda: Calling(lambda x: x[x > 0])),
    # Dtypes
    "float16": Case(make=lambda: layers(nn.Linear(64, 64), nn.ReLU()).half(), inputs={"x": random_inputs(2, 64).half()}),
    "bfloat16": Case(make=lambda: layers(nn.Linear(64, 64), nn.ReLU()).bfloat16(), inputs={"x": random_inputs(2, 64).bfloat16()}),
    "float64": Case(make=lambda: layers(nn.Linear(4, 4), nn.ReLU()).double(), inputs={"x": X.double()}),
    "complex64 weights and inputs": Case(
        make=lambda: layers(nn.Linear(4, 4, dtype=torch.complex64)),
        inputs={"x": torch.complex(X, X.flip(0))},
        says="a defect of AOTInductor; torchscript-frozen serves the model",
    ),
    "complex128": Case(
        make=lambda: layers(nn.Linear(4, 4, dtype=torch.complex128)),
        inputs={"x": torch.complex(X, X.flip(0)).to(torch.complex128)},
        says="a defect of AOTInductor; torchscript-frozen serves the model",
    ),
    "complex numbers inside": Case(make=lambda: Calling(complex_inside)),
    "a lazy conjugate as a result": Case(make=lambda: Calling(lambda x: torch.complex(x, x * 2).conj())),
    "modules of several dtypes": Case(make=MixedDtypes),
    "an autocast region, cast back": Case(make=lambda: Calling(autocast)),
    "an autocast region around a layer": Case(make=AutocastLinear, inputs={"x": random_inputs(2, 64)}),
    # Quantization
    "dynamically quantized layers": Case(
        make=dynamic_quantized, inputs={"x": X}, says="quantized layers .*; freeze the float model, or quantize it with torchao"
    ),
    "FX-quantized models": Case(
        make=lambda: fx_quantized(converted=True),
        inputs={"x": X},
        says="quantized layers .*; freeze the float model, or quantize it with torchao",
    ),
    "models prepared for quantization": Case(
        make=lambda: fx_quantized(converted=False),
        inputs={"x": X},
        says="the trace would keep for all calls what Python reads of its inputs at a line of torch; use",
        exported="the model holds observers, .*; convert it",
    ),
    # Operations
    "`einsum`": Case(make=weighted(lambda y: torch.einsum("bi,bj->bij", y, y)), dims={"x": {0: BATCH}}),
    "`nn.EmbeddingBag`": Case(make=Bag, inputs={"ids": torch.arange(10).reshape(2, 5)}),
    "`nn.LSTM`": Case(make=lambda: Recurrent(nn.LSTM), inputs={"x": SEQUENCE}, dims={"x": {0: BATCH, 1: SIZE}}, exported=FIXED),
    "`nn.GRU`": Case(make=lambda: Recurrent(nn.GRU), inputs={"x": SEQUENCE}, dims={"x": {0: BATCH, 1: SIZE}}, exported=FIXED),
    "packed sequences": Case(
        make=Packed,
        inputs={"x": SEQUENCE, "lengths": torch.tensor([5, 3])},
        says="a size comes from the values of a tensor, .*; give the padded batch",
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
    "FFT": Case(make=lambda: Calling(spectrum), dims={"x": {0: BATCH}}),
    "a custom operator with a fake kernel": Case(
        make=weighted(doubled), says="the graph calls coldpress_tests::doubled, .*; write it in torch's operations"
    ),
    "`torch.cond`": Case(
        make=lambda: Calling(conditional), says=r"forward calls torch\.cond, .*; leave torch\.cond to torch\.export"
    ),
    "`torch.vmap`": Case(make=lambda: Calling(torch.vmap(scaled_row))),
    "gradients inside `forward`": Case(
        make=Force,
        says=r"uses a tensor that requires grad, .* at models_features\.py:.*grad\(energy, x\); make it one",
        exported="forward differentiates, .*; write the gradient out in torch's operations",
    ),
    "activation checkpointing": Case(make=Checkpointed),
}
