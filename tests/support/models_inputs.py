"""INPUTS: a tiny model for every row of "Inputs and results" and "Dtypes" in
docs/reference/what-freezes.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.cases import Case
from tests.support.models import Calling, Layers, linear_then
from tests.support.steps import BATCH, random_inputs

X = random_inputs(2, 4)
WIDE = random_inputs(2, 64)
IMAGE = random_inputs(2, 3, 8, 8)
QUANTIZED = "quantized layers .*; freeze the float model, or quantize it with torchao"


class Optionals(nn.Module):
    """An optional input that is not given, and an output that is None."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return (x * 2, None) if bias is None else (x * 2 + bias, bias)


class Choosing(nn.Module):
    """Takes int64, uint8, bool and float inputs."""

    def forward(self, ids: Tensor, pixels: Tensor, keep: Tensor, x: Tensor) -> Tensor:
        return torch.where(keep, x, torch.zeros_like(x)) + ids + pixels.float() / 255


class Returning(nn.Module):
    """Returns views, one tensor twice, its input, its own parameter and buffer, and a tensor that
    it has written into.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale: Tensor = nn.Buffer(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x)
        views = (y.t(), y[:, ::2], y.expand(3, 2, 4))
        twice = y * 2
        written = y.clone()
        written[:, 1:].mul_(3)
        row = written[0]
        row.add_(1)
        own = (self.linear.weight, self.scale)
        return (*views, twice, twice, x, x[:, 1:], x.t(), *own, written, row)


def structures(y: Tensor) -> dict[str, Any]:
    return {"b": [y, (y.sum(),)], "a": (y.argmax(1), y > 0), "kind": "scores", "n": 3, "none": None}


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
        return self.wide(self.narrow(x.bfloat16()).float())


def dynamic_quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(
            Layers(nn.Linear(4, 4), nn.ReLU()).eval(), {nn.Linear}
        )


def fx_prepared() -> nn.Module:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_fx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = prepare_fx(
            nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(),
            get_default_qconfig_mapping("x86"),
            (X,),
        )
        model(X)
        return model


INPUTS: Mapping[str, Case] = {
    # Inputs and results
    "sparse inputs": Case(
        make=lambda: Calling(lambda x: x.to_dense() * 2),
        inputs={"x": X.relu().to_sparse()},
        says=(
            r"input 'x': got a tensor that is sparse, .* expected a dense one; give \.to_dense\(\)"
        ),
    ),
    "example inputs in channels-last layout, or that require gradients": Case(
        make=lambda: Layers(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(),
        inputs={"x": IMAGE.to(memory_format=torch.channels_last).requires_grad_()},
    ),
    "integer, uint8 and bool inputs": Case(
        make=Choosing,
        inputs={
            "ids": torch.arange(8).reshape(2, 4),
            "pixels": (X.abs() * 50).to(torch.uint8),
            "keep": X > 0,
            "x": X,
        },
        dims={name: {0: BATCH} for name in ("ids", "pixels", "keep", "x")},
    ),
    "optional inputs that are None, outputs that are None": Case(
        make=Optionals, inputs={"x": X, "bias": None}
    ),
    "an empty batch": Case(make=linear_then(lambda y: y), inputs={"x": torch.zeros(0, 4)}),
    "results that nest dicts, lists, tuples, strings, numbers and None": Case(
        make=linear_then(structures)
    ),
    "views, inputs, parameters and buffers as results, in-place operations on intermediates": Case(
        make=Returning
    ),
    "a sparse result": Case(
        make=linear_then(lambda y: y.relu().to_sparse()),
        says=r"expected a dense tensor on cpu.*return \.to_dense\(\)",
    ),
    "sparse tensors inside": Case(
        make=linear_then(lambda y: y.relu().to_sparse().to_dense()),
        says="which only torchscript-frozen takes",
    ),
    "results whose size depends on values (`nonzero`)": Case(
        make=lambda: Calling(lambda x: x[x > 0])
    ),
    # Dtypes
    "float16": Case(
        make=lambda: Layers(nn.Linear(64, 64), nn.ReLU()).half(), inputs={"x": WIDE.half()}
    ),
    "bfloat16": Case(
        make=lambda: Layers(nn.Linear(64, 64), nn.ReLU()).bfloat16(), inputs={"x": WIDE.bfloat16()}
    ),
    "float64": Case(
        make=lambda: Layers(nn.Linear(64, 64), nn.ReLU()).double(), inputs={"x": WIDE.double()}
    ),
    "complex64 or complex128 weights and inputs": Case(
        make=lambda: Layers(nn.Linear(4, 4, dtype=torch.complex64)),
        inputs={"x": torch.complex(X, X.flip(0))},
        says="Mismatch between ints consumed",
    ),
    "complex numbers inside, a lazy conjugate as a result": Case(
        make=lambda: Calling(complex_inside)
    ),
    "modules of several dtypes": Case(make=MixedDtypes),
    "autocast regions": Case(make=Autocast, inputs={"x": WIDE}),
    "dynamically quantized layers": Case(make=dynamic_quantized, inputs={"x": X}, says=QUANTIZED),
    "models prepared for quantization": Case(
        make=fx_prepared,
        inputs={"input": X},
        says=(
            "the trace would keep for all calls what Python reads of its inputs at a line of"
            " torch; use"
        ),
        exported="the model holds observers, .*; convert it",
    ),
}
