"""Eight small architectures whose operators the mutations rewrite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.graph import CodeGen
from torch.nn import functional as F  # noqa: N812

from freezer.spec import Dim

_Dims = Mapping[str, Mapping[int, Dim]]


@dataclass(frozen=True)
class Architecture:
    """A model with seeded weights as a graph of ATen operators, its inputs and their dims."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Mapping[str, Tensor]
    dims: _Dims

    def model(self) -> nn.Module:
        """A new model."""
        torch.manual_seed(0)
        model = self.make().eval()
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and ("norm" in name or name.endswith("bias")):
                tensor.add_(0.3 * torch.rand_like(tensor))
        return model

    def graph(self) -> GraphModule:
        """A new copy."""
        model = self.model()
        shapes = {
            name: dict.fromkeys(self.dims.get(name, {}), torch.export.Dim.AUTO)
            for name in self.inputs
        }
        exported = torch.export.export(model, (), dict(self.inputs), dynamic_shapes=shapes)
        graph = exported.module(check_guards=False)
        assert isinstance(graph, GraphModule)
        graph.graph.set_codegen(CodeGen())  # without dicts and other structures
        for node in graph.graph.nodes:
            if node.target is torch.ops.aten.sym_size.int:
                node.target = size_of
        return GraphModule(graph, graph.graph).eval()


def size_of(x: Tensor, dim: int) -> int:
    """A size that a trace records."""
    return x.shape[dim]


class Tabular(nn.Module):
    """Dense layers on columns of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(16, 32), nn.Linear(32, 32)
        self.last, self.norm = nn.Linear(32, 4), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x))
        h = h + F.silu(self.middle(self.norm(h)))
        return (4 * self.last(h)).softmax(-1)


class Convolutional(nn.Module):
    """A residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.norm_after = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu(self.norm(self.stem(x))), 2)
        h = F.relu(h + self.norm_after(self.inner(h)))
        return self.head(h.mean([2, 3]))


class Attentive(nn.Module):
    """A transformer's layer over tokens with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 16), nn.Embedding(24, 16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm, self.norm_after = nn.LayerNorm(16), nn.LayerNorm(16)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        places = torch.ones_like(ids).cumsum(-1) - 1
        h = self.tokens(ids) + self.positions(places)
        g = self.norm(h)
        q, k, v = (
            part(g).unflatten(-1, (2, 8)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        h = h + attended.transpose(1, 2).flatten(2)
        return h + self.down(F.gelu(self.up(self.norm_after(h))))


class Recurrent(nn.Module):
    """A gated recurrence over a fixed number of steps, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.new, self.head = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.zeros_like(x[:, 0])
        for step in range(3):
            both = torch.cat([x[:, step], h], -1)
            share = torch.sigmoid(self.gate(both))
            h = share * h + (1 - share) * torch.tanh(self.new(both))
        return self.head(h), h


class Detecting(nn.Module):
    """Boxes in pixels beside probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.boxes, self.kinds = (nn.Conv2d(n, m, 3, padding=1) for n, m in _DETECTOR)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = F.silu(self.body(x))
        boxes = torch.sigmoid(self.boxes(h)) * 640
        kinds = self.kinds(h).flatten(2).transpose(1, 2).softmax(-1)
        return {"boxes": boxes.flatten(2), "kinds": kinds}


_DETECTOR = ((3, 8), (8, 4), (8, 5))


class Segmenting(nn.Module):
    """Down, up, and masks of probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(11, 2, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.elu(self.norm(self.down(x)))
        h = F.interpolate(h, scale_factor=2.0, mode="bilinear")
        return torch.sigmoid(self.up(torch.cat([h, x], 1)))


class Ranking(nn.Module):
    """Scores of pairs in log space, from rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(100, 16)
        self.user = nn.Linear(8, 16)

    def forward(self, user: Tensor, items: Tensor) -> dict[str, Tensor]:
        scores = (self.items(items) * self.user(user)[:, None]).sum(-1)
        return {"logs": F.logsigmoid(scores), "total": scores.logsumexp(-1)}


class Listening(nn.Module):
    """Frames of a signal, normalized and pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, (1, 5), padding=(0, 2)), nn.Linear(6, 6)
        self.norm, self.head = nn.GroupNorm(3, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.elu(self.norm(self.first(x[:, None, None])))
        h = torch.tanh(self.second(h.flatten(2).transpose(1, 2)))
        return self.head(h.mean([1]))


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _whole(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0))


_BATCH = Dim(name="batch", min=2, max=6)
_LENGTH = Dim(name="length", min=2, max=24)
_MASK = torch.tensor([[True] * 12, [True] * 7 + [False] * 5])

ARCHITECTURES = {
    item.name: item
    for item in (
        Architecture("tabular", Tabular, {"x": _random(4, 16)}, {"x": {0: _BATCH}}),
        Architecture("convolutional", Convolutional, {"x": _random(2, 3, 16, 16)}, {}),
        Architecture(
            "attentive",
            Attentive,
            {"ids": _whole(50, 2, 12), "mask": _MASK},
            {"ids": {1: _LENGTH}, "mask": {1: _LENGTH}},
        ),
        Architecture("recurrent", Recurrent, {"x": _random(4, 3, 8)}, {"x": {0: _BATCH}}),
        Architecture("detecting", Detecting, {"x": _random(2, 3, 12, 12)}, {"x": {0: _BATCH}}),
        Architecture("segmenting", Segmenting, {"x": _random(2, 3, 16, 16)}, {}),
        Architecture(
            "ranking",
            Ranking,
            {"user": _random(4, 8), "items": _whole(100, 4, 10)},
            {"user": {0: _BATCH}, "items": {0: _BATCH}},
        ),
        Architecture("listening", Listening, {"x": _random(3, 64)}, {"x": {0: _BATCH}}),
    )
}
