"""WEIGHTS: a tiny model for every row of "Modes, weights and state" in
docs/reference/what-freezes.md.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.support.cases import DIFFERS_LATER, Case
from tests.support.models import Calling, Counter, Layers, ReassignedCounter
from tests.support.steps import random_inputs

X = random_inputs(2, 4)
IMAGE = random_inputs(2, 3, 8, 8)


class StaysInTraining(nn.Module):
    """Keeps its batch norm in training mode: the answer depends on the batch, and each call
    counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def train(self, mode: bool = True) -> StaysInTraining:
        super().train(mode)
        self.norm.train()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class UnusualWeights(nn.Module):
    """Weights that are tied, made in inference mode, without gradients, and with strides of 0;
    buffers that are saved or not, and a tensor that is neither parameter nor buffer.
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.linear = nn.Linear(4, 4)
        self.fixed = nn.Linear(4, 4).requires_grad_(False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.fixed.weight
        self.expanded = nn.Parameter(torch.randn(1, 4).expand(4, 4))
        self.scale: Tensor = nn.Buffer(torch.full((4,), 3.0))
        self.shift: Tensor = nn.Buffer(torch.full((4,), 5.0), persistent=False)
        self.plain = torch.full((4,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(self.tied(self.fixed(self.linear(x))), self.expanded)
        return y * self.scale * self.plain + self.shift


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


class Locked(nn.Module):
    """Holds a lock, which cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lock = nn.Linear(4, 4), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class SparseWeights(nn.Module):
    """A sparse weight in COO layout, and one in CSR layout."""

    def __init__(self) -> None:
        super().__init__()
        self.coo: Tensor = nn.Buffer(torch.eye(4).mul(2).to_sparse())
        self.csr: Tensor = nn.Buffer(torch.eye(4).mul(2).to_sparse_csr())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.csr, torch.sparse.mm(self.coo, x.t())).t()


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Layers(nn.Linear(4, 4)).eval()


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def parametrized() -> nn.Module:
    own = nn.Linear(4, 4)
    parametrize.register_parametrization(own, "weight", Symmetric())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        by_hooks = nn.utils.weight_norm(nn.Linear(4, 4)), nn.utils.spectral_norm(nn.Linear(4, 4))
    return Layers(
        *by_hooks,
        parametrizations.weight_norm(nn.Linear(4, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
        own,
    ).eval()


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
        return self.table(ids)


WEIGHTS: Mapping[str, Case] = {
    "dropout and batch norm layers, also without running statistics": Case(
        make=lambda: Layers(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.Dropout(0.5),
            nn.BatchNorm2d(4, track_running_stats=False),
        ).eval(),
        inputs={"x": IMAGE},
    ),
    "`F.dropout` without `training=`, `torch.rand`": Case(
        make=lambda: Calling(lambda x: F.dropout(x, 0.5)),
        says="a random number is drawn, .* at `.*F.dropout.*`\\); .*pass `training=self.training`",
    ),
    "a submodule that stays in training mode": Case(
        make=StaysInTraining,
        inputs={"x": IMAGE},
        says="output 'output', input set 0 .*: error_ratio",
        exported=(r"a call changes norm\.num_batches_tracked, .*; torchscript-frozen keeps state"),
    ),
    "weights that are views of a larger storage": Case(make=Sliced),
    (
        "tied weights, buffers, tensors as plain attributes; weights made in inference mode,"
        " without gradients, or expanded (stride 0)"
    ): Case(make=UnusualWeights),
    "sparse weights (COO, CSR)": Case(
        make=SparseWeights, says="sparse tensors, which only torchscript-frozen takes"
    ),
    "attributes that cannot be copied (locks, files)": Case(
        make=Locked, says="cannot be copied, .* cannot pickle '_thread.lock'"
    ),
    "weights on the meta device": Case(
        make=on_meta, inputs={"x": X}, says="on the meta device, .*; load the weights"
    ),
    "lazy layers before their first call": Case(
        make=lambda: Layers(nn.LazyLinear(4)),
        inputs={"x": X},
        says="of lazy layers, .* call the model once before freezing",
    ),
    "`nn.utils.weight_norm`, `nn.utils.spectral_norm`, parametrizations": Case(make=parametrized),
    "weights in channels-last layout": Case(make=channels_last, inputs={"x": IMAGE}),
    "a buffer changed by a call": Case(
        make=Counter, says=r"a call changes count, .*; torchscript-frozen keeps state"
    ),
    "a buffer that is a view of another, changed by a call": Case(
        make=Shown,
        says=(
            "the trace differs from the model on input set 0|cannot tell which tensors a call"
            " changes"
        ),
    ),
    "an attribute replaced by every call": Case(make=ReassignedCounter, exported=DIFFERS_LATER),
    "an embedding with `max_norm`": Case(
        make=MaxNorm,
        inputs={"ids": torch.arange(10).reshape(2, 5)},
        says=r"a call changes table\.weight",
    ),
}
