"""Right and wrong rewrites of one operator in eight architectures, as candidates of the judge.

    python -m tests.support.mutations [ARCHITECTURE ...]

prints, for each architecture, how many of each kind the judge accepts and refuses, and which of
them it takes for the other kind.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional as F  # noqa: N812

from freezer.freezing.judging import Trial, judge
from tests.support.mutated_models import ARCHITECTURES, Architecture
from tests.support.steps import candidate_of, session_of, subject_of, target_of

RECIPE = "torchscript-exact"

aten = torch.ops.aten

Operator = Callable[..., Any]


@dataclass(frozen=True)
class Rewrite:
    """One operator of a graph in another form.

    Attributes:
        operator: the overload that is replaced.
        name: what it becomes, in words.
        make: makes the new function of the old one; both take the same arguments.
        wrong: whether answers change beyond rounding.
    """

    operator: Operator
    name: str
    make: Callable[[Operator], Operator]
    wrong: bool


@dataclass(frozen=True)
class Mutation:
    """A rewrite of one node of an architecture."""

    architecture: str
    node: str
    rewrite: Rewrite

    def __str__(self) -> str:
        return f"{self.architecture}: {self.node}: {self.rewrite.name}"


def _on_result(change: Callable[[Any], Any]) -> Callable[[Operator], Operator]:
    """A rewrite of what an operator returns."""
    return lambda operator: lambda *args, **kwargs: change(operator(*args, **kwargs))


def _on_argument(index: int, change: Callable[[Any], Any]) -> Callable[[Operator], Operator]:
    """A rewrite of one argument; nothing changes where the call lacks it."""

    def make(operator: Operator) -> Operator:
        def call(*args: Any, **kwargs: Any) -> Any:
            changed = list(args)
            if index < len(args) and args[index] is not None:
                changed[index] = change(args[index])
            return operator(*changed, **kwargs)

        return call

    return make


def _as(function: Operator) -> Callable[[Operator], Operator]:
    """A rewrite as another function of the same arguments."""
    return lambda operator: function


def _rounded(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).to(x.dtype)


def _int8(w: Tensor) -> Tensor:
    scale = w.abs().max() / 127
    return (w / scale).round() * scale


def _one_changed(factor: float) -> Callable[[Tensor], Tensor]:
    """One slice along the first dim in the middle times a factor."""

    def change(x: Tensor) -> Tensor:
        changed = x.clone()
        changed[x.shape[0] // 2] *= factor
        return changed

    return change


def _last_column(x: Tensor) -> Tensor:
    """The last place along the last dim takes its neighbour's value."""
    return torch.cat([x[..., :-1], x[..., -2:-1]], -1)


def _mixed_rows(x: Tensor) -> Tensor:
    """A hundredth of each row comes from the next one."""
    return 0.99 * x + 0.01 * x.roll(1, 0)


def _halves(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    half = w.shape[1] // 2
    y = F.linear(x[..., :half], w[:, :half]) + F.linear(x[..., half:], w[:, half:])
    return y if b is None else y + b


def _wide(operator: Operator) -> Operator:
    """In double precision inside."""

    def widened(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.dtype == torch.float32
        return value.double() if is_float else value

    return lambda *args, **kwargs: operator(*map(widened, args), **kwargs).float()


def _permuted(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Sums in the opposite order."""
    return F.linear(x.flip(-1), w.flip(-1), b)


def _transposed(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    y = torch.matmul(w, x.unsqueeze(-1)).squeeze(-1)
    return y if b is None else b + y


def _rowwise(operator: Operator) -> Operator:
    """Row by row, as batches are cut into tiles."""

    def call(x: Tensor, *args: Any) -> Any:
        return torch.cat([operator(x[:1], *args), operator(x[1:], *args)])

    return call


def _layer_norm(
    x: Tensor, shape: Sequence[int], w: Tensor, b: Tensor, eps: float = 1e-5, *_: Any
) -> Tensor:
    """By the mean of squares of differences."""
    apart = x - x.mean(-1, keepdim=True)
    return apart * torch.rsqrt((apart * apart).mean(-1, keepdim=True) + eps) * w + b


def _norm_with(eps: float) -> Operator:
    def norm(x: Tensor, shape: Sequence[int], w: Tensor, b: Tensor, *_: Any) -> Tensor:
        return F.layer_norm(x, shape, w, b, eps)

    return norm


def _folded_norm(
    x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, *_: Any, eps: float = 1e-5
) -> Tensor:
    """One factor and one term, as folded into a convolution."""
    factor = w * torch.rsqrt(var + eps)
    term = b - mean * factor
    return x * factor[:, None, None] + term[:, None, None]


def _batch_statistics(x: Tensor, w: Tensor, b: Tensor, *_: Any) -> Tensor:
    return F.batch_norm(x, None, None, w, b, training=True)


def _softmax(x: Tensor, dim: int, *_: Any) -> Tensor:
    powers = (x.contiguous() - x.amax(dim, keepdim=True)).exp()
    return powers / powers.sum(dim, keepdim=True)


def _unsafe_softmax(x: Tensor, dim: int, *_: Any) -> Tensor:
    return x.exp() / x.exp().sum(dim, keepdim=True)


def _attention(scale: float = 1.0, lowest: float = -math.inf, masked: bool = True) -> Operator:
    """Attention written out; a row without keys gives zeros only if `lowest` is infinite."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *_: Any) -> Tensor:
        scores = q @ k.mT * (scale / math.sqrt(q.shape[-1]))
        if mask is not None and masked:
            scores = scores.masked_fill(~mask, lowest)
        shares = scores.softmax(-1)
        if lowest == -math.inf:
            shares = shares.nan_to_num()
        return shares @ v

    return attend


def _unfolded(
    x: Tensor, w: Tensor, b: Tensor | None = None, stride: Any = 1, padding: Any = 0, *_: Any
) -> Tensor:
    """A convolution as a product of matrices."""
    columns = F.unfold(x, w.shape[2:], padding=padding, stride=stride)
    y = w.flatten(1) @ columns
    height = (x.shape[2] + 2 * padding[0] - w.shape[2]) // stride[0] + 1
    y = y.unflatten(2, (height, -1))
    return y if b is None else y + b[:, None, None]


def _channels_last(operator: Operator) -> Operator:
    def call(x: Tensor, *args: Any) -> Any:
        return operator(x.contiguous(memory_format=torch.channels_last), *args).contiguous()

    return call


def _edges(
    x: Tensor, w: Tensor, b: Tensor | None = None, stride: Any = 1, padding: Any = 0, *_: Any
) -> Tensor:
    """Padded with the edge's values in place of zeros."""
    height, width = padding
    padded = F.pad(x, (width, width, height, height), mode="replicate")
    return F.conv2d(padded, w, b, stride)


def _log_sigmoid_unstable(x: Tensor) -> Tensor:
    return torch.log(torch.sigmoid(x))


def _log_sigmoid_stable(x: Tensor) -> Tensor:
    return x.clamp(max=0) - torch.log1p(torch.exp(-x.abs()))


def _silent_tail(x: Tensor) -> Tensor:
    """Small values become zero, as on units that flush them."""
    return torch.where(x.abs() < 1e-3, torch.zeros_like(x), x)


def _wrong(operator: Operator, **forms: Callable[[Operator], Operator]) -> list[Rewrite]:
    return [Rewrite(operator, name.replace("_", " "), make, True) for name, make in forms.items()]


def _right(operator: Operator, **forms: Callable[[Operator], Operator]) -> list[Rewrite]:
    return [Rewrite(operator, name.replace("_", " "), make, False) for name, make in forms.items()]


REWRITES = [
    *_right(
        aten.linear.default,
        two_halves=_as(_halves),
        sums_in_opposite_order=_as(_permuted),
        weights_first=_as(_transposed),
        in_double=_wide,
        row_by_row=_rowwise,
    ),
    *_wrong(
        aten.linear.default,
        weights_of_bfloat16=_on_argument(1, _rounded(torch.bfloat16)),
        weights_of_int8=_on_argument(1, _int8),
        inputs_of_float16=_on_argument(0, _rounded(torch.float16)),
        weights_off_by_1e_4=_on_argument(1, lambda w: w * (1 + 1e-4)),
        one_neuron_off_by_1e_3=_on_argument(1, _one_changed(1.001)),
        one_bias_lost=_on_argument(2, _one_changed(0.0)),
        rows_mixed=_on_result(_mixed_rows),
        last_column_repeated=_on_result(_last_column),
        clipped_at_1=_on_result(lambda y: y.clamp(-1, 1)),
    ),
    *_right(
        aten.conv2d.default,
        as_a_product=_as(_unfolded),
        in_double=_wide,
        row_by_row=_rowwise,
        channels_last=_channels_last,
    ),
    *_wrong(
        aten.conv2d.default,
        padded_with_edges=_as(_edges),
        weights_of_bfloat16=_on_argument(1, _rounded(torch.bfloat16)),
        weights_of_int8=_on_argument(1, _int8),
        one_channel_off_by_1e_3=_on_argument(1, _one_changed(1.001)),
        last_column_repeated=_on_result(_last_column),
        rows_mixed=_on_result(_mixed_rows),
    ),
    *_right(aten.batch_norm.default, folded=_as(_folded_norm)),
    *_wrong(
        aten.batch_norm.default,
        of_the_batch=_as(_batch_statistics),
        another_epsilon=_as(lambda *args: _folded_norm(*args[:5], eps=1e-3)),
        mean_lost=_on_argument(3, torch.zeros_like),
    ),
    *_right(aten.layer_norm.default, written_out=_as(_layer_norm), in_double=_wide),
    *_wrong(
        aten.layer_norm.default,
        another_epsilon=_as(_norm_with(1e-3)),
        bias_lost=_on_argument(3, torch.zeros_like),
        one_factor_off_by_1e_3=_on_argument(2, _one_changed(1.001)),
    ),
    *_right(
        aten.gelu.default,
        written_out=_as(lambda x, **_: 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))),
        in_double=_wide,
    ),
    *_wrong(
        aten.gelu.default,
        by_tanh=_as(lambda x, **_: F.gelu(x, approximate="tanh")),
        by_a_sigmoid=_as(lambda x, **_: x * torch.sigmoid(1.702 * x)),
    ),
    *_right(aten.relu.default, as_a_maximum=_as(lambda x: torch.clamp(x, min=0))),
    *_wrong(
        aten.relu.default,
        leaky=_as(lambda x: F.leaky_relu(x, 1e-3)),
        clipped_at_6=_as(F.relu6),
        small_values_lost=_on_result(_silent_tail),
    ),
    *_right(aten.softmax.int, written_out=_as(_softmax), in_double=_wide),
    *_wrong(
        aten.softmax.int,
        without_the_maximum=_as(_unsafe_softmax),
        over_the_first_dim=_as(lambda x, dim, *_: x.softmax(0)),
        of_float16=_on_result(_rounded(torch.float16)),
        small_shares_lost=_on_result(_silent_tail),
    ),
    *_right(aten.sigmoid.default, by_exp=_as(lambda x: 1 / (1 + torch.exp(-x))), in_double=_wide),
    *_wrong(
        aten.sigmoid.default,
        hard=_as(F.hardsigmoid),
        of_float16=_on_result(_rounded(torch.float16)),
    ),
    *_right(aten.silu.default, written_out=_as(lambda x: x * torch.sigmoid(x)), in_double=_wide),
    *_wrong(aten.silu.default, hard=_as(F.hardswish)),
    *_right(aten.elu.default, in_double=_wide),
    *_wrong(
        aten.elu.default,
        exp_minus_1=_as(lambda x, *_: torch.where(x > 0, x, x.exp() - 1)),
        as_selu=_as(lambda x, *_: F.selu(x)),
    ),
    *_right(aten.tanh.default, in_double=_wide),
    *_wrong(
        aten.tanh.default, hard=_as(F.hardtanh), of_float16=_on_result(_rounded(torch.float16))
    ),
    *_right(
        aten.scaled_dot_product_attention.default, written_out=_as(_attention()), in_double=_wide
    ),
    *_wrong(
        aten.scaled_dot_product_attention.default,
        another_scale=_as(_attention(scale=1.01)),
        mask_lost=_as(_attention(masked=False)),
        empty_rows_averaged=_as(_attention(lowest=-1e4)),
        keys_of_bfloat16=_on_argument(1, _rounded(torch.bfloat16)),
    ),
    *_right(aten.log_sigmoid.default, written_out=_as(_log_sigmoid_stable), in_double=_wide),
    *_wrong(aten.log_sigmoid.default, unstable=_as(_log_sigmoid_unstable)),
    *_right(aten.group_norm.default, in_double=_wide),
    *_wrong(
        aten.group_norm.default,
        another_epsilon=_as(lambda x, groups, w, b, *_: F.group_norm(x, groups, w, b, 1e-3)),
        one_group=_as(lambda x, groups, w, b, *_: F.group_norm(x, 1, w, b)),
    ),
    *_wrong(
        aten.embedding.default,
        table_of_float16=_on_argument(0, _rounded(torch.float16)),
        first_row_lost=_on_argument(0, lambda w: torch.cat([torch.zeros_like(w[:1]), w[1:]])),
        last_row_repeated=_on_argument(0, lambda w: torch.cat([w[:-1], w[-2:-1]])),
        positions_off_by_one=_on_argument(1, lambda i: (i - 1).clamp(min=0)),
    ),
    *_right(aten.upsample_bilinear2d.vec, in_double=_wide),
    *_wrong(
        aten.upsample_bilinear2d.vec,
        nearest=_as(lambda x, size, corners, scales: F.interpolate(x, size, scales)),
        aligned=_as(
            lambda x, size, corners, scales: F.interpolate(
                x, size, scales, mode="bilinear", align_corners=True
            )
        ),
    ),
    *_right(aten.max_pool2d.default, in_double=_wide),
    *_wrong(aten.max_pool2d.default, averaged=_as(lambda x, *args: F.avg_pool2d(x, *args[:2]))),
    *_right(aten.mean.dim, as_a_sum=_as(lambda x, dim, *keep: _mean(x, dim, *keep))),
    *_wrong(
        aten.mean.dim,
        of_the_first=_as(lambda x, dim, *keep: _mean(x.narrow(dim[0], 0, 1), dim, *keep)),
        unbiased=_on_result(lambda y: y * 1.01),
    ),
    *_right(aten.logsumexp.default, in_double=_wide),
    *_wrong(
        aten.logsumexp.default,
        without_the_maximum=_as(lambda x, dim, *_: x.exp().sum(dim).log()),
    ),
]


def _mean(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    dims = list(dim)
    return x.flip(dims).sum(dims, keepdim) / math.prod(x.shape[i] for i in dims)


def mutations() -> Iterator[Mutation]:
    """All of them, in one order."""
    for architecture in ARCHITECTURES.values():
        for node in architecture.graph().graph.nodes:
            for rewrite in REWRITES:
                if node.target is rewrite.operator:
                    yield Mutation(architecture.name, node.name, rewrite)


def judged(architecture: Architecture, chosen: Sequence[Mutation], folder: Path) -> list[Trial]:
    """The judge's trials of the architecture's mutations."""
    subject = subject_of(architecture.graph(), architecture.inputs, architecture.dims)
    candidates = []
    for number, mutation in enumerate(chosen):
        graph = architecture.graph()
        node = next(node for node in graph.graph.nodes if node.name == mutation.node)
        _replace(graph, node, mutation.rewrite)
        served = subject_of(graph, architecture.inputs, architecture.dims)
        made = candidate_of(served, RECIPE, folder / str(number))
        candidates.append(replace(made, recipe=str(number), weights=subject.weights))
    target = target_of(subject, RECIPE, torch.get_num_threads())
    return list(judge(session_of(subject, target), candidates).trials)


def _replace(graph: GraphModule, node: Node, rewrite: Rewrite) -> None:
    operator = node.target
    assert callable(operator)
    function = rewrite.make(operator)

    def rewritten(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    node.target = rewritten
    graph.recompile()


def main(names: Sequence[str]) -> None:
    """Print the confusion matrix, and what the judge takes for the other kind."""
    titles = ("wrong: rejected", "accepted", "harmless: accepted", "rejected")
    print(f"| {'architecture':13} | {' | '.join(titles)} |")
    print("|-".ljust(16, "-") + "".join("|-" + "-" * len(title) + "-" for title in titles) + "|")
    totals = Counter[int]()
    mistaken: list[str] = []
    for name in names or ARCHITECTURES:
        chosen = [item for item in mutations() if item.architecture == name]
        with tempfile.TemporaryDirectory() as folder:
            trials = judged(ARCHITECTURES[name], chosen, Path(folder))
        counts = Counter[int]()
        for item, trial in zip(chosen, trials, strict=True):
            accepted, wrong = trial.problem is None, item.rewrite.wrong
            counts[accepted if wrong else 3 - accepted] += 1
            if accepted == wrong:
                mistaken.append(f"{item}: {trial.problem or 'accepted'}")
        totals += counts
        _print_row(name, counts, titles)
    _print_row("all", totals, titles)
    print(*mistaken, sep="\n")


def _print_row(name: str, counts: Mapping[int, int], titles: Sequence[str]) -> None:
    cells = [f"{counts[index]:{len(title)}}" for index, title in enumerate(titles)]
    print(f"| {name:13} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
