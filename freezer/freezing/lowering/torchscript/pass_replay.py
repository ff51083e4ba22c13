"""Replay of torch.jit.freeze pass by pass on copies of the graphs, to count what each pass did.

torch.jit.freeze has two steps in C++, which report nothing:

    _freeze_module                    makes attributes constants, then cleans up (runOptimization in graph_executor.cpp)
    _jit_pass_optimize_frozen_graph   folds dropouts, batch norms, ... (frozen_graph_optimizations.cpp)

The replay runs the same passes in the same order. If its operators differ from torch's, as with another torch whose passes differ,
it raises ReplayError. Weights are shared with the module; results of folding exist twice meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from freezer.freezing.lowering.torchscript.graph_analysis import (
    Path,
    attribute_of,
    has_attribute,
    inlined,
    operators,
    scopes,
    tensors_in,
)

_DROPOUTS = ("aten::dropout", "aten::dropout_", "aten::feature_dropout", "aten::feature_dropout_")

DROPOUT = "dropouts removed"
CONCAT = "linear layers over one input concatenated"
DEAD, MERGED, SIMPLIFIED = "operators without effect removed", "common subexpressions merged", "operators simplified (peephole)"
COMPUTED, BRANCHES, UNROLLED = "operators computed into constants", "branches decided", "loops unrolled"
COMPUTED_OR_DEAD = "operators computed into constants, or in branches that are never taken"
APPENDED = "appends to lists replaced by the lists"
NO_OPS, CASTS = "detach removed", "casts of autocast regions written out"

NUMERIC_PASSES: Mapping[str, str] = {
    "fold_frozen_conv_bn": "batch norms folded into convolutions",
    "fold_frozen_conv_add_or_sub": "additions and subtractions folded into convolutions",
    "fold_frozen_conv_mul_or_div": "multiplications and divisions folded into convolutions",
    "fold_frozen_linear_bn": "batch norms folded into linear layers",
}
"""Passes of optimize_numerics, which torch repeats in this order until nothing changes."""

FUSED, TRANSPOSED = "convolutions fused with add and relu", "linear layers pretransposed"
MKLDNN = "convolutions and linear layers moved to oneDNN's layouts"


class ReplayError(Exception):
    """The replay did not reproduce torch's result, or torch lacks a pass."""


def clean_up(module: Any, frozen: Any, methods: Sequence[str]) -> Counter[str]:
    """Count what making attributes constants, and the clean-up after it, did to the graphs.

    Args:
        module: the C++ module before it was frozen.
        frozen: the result of torch._C._freeze_module, before any optimization.
        methods: the frozen methods.

    Raises:
        ReplayError: see there.
    """
    counts: Counter[str] = Counter()
    for method in methods:
        graph = inlined(module, method)
        _make_constants(graph, module, frozen, tensors=True)
        for scope in scopes(graph):
            _Replay(scope.graph, counts).clean_up()
        replay, expected = _Replay(graph, counts), operators(frozen._get_method(method).graph)
        if _but(replay.ops, "aten::detach") != _but(expected, "aten::detach"):
            _pass("lower_all_tuples")(graph)  # torch only lowers simple tuples, but the remaining operators are the same
            replay.run("dce_graph", DEAD)
        replay.count(NO_OPS, replay.ops["aten::detach"] - expected["aten::detach"])
        if _but(replay.ops, "aten::detach") != _but(expected, "aten::detach"):
            raise ReplayError(f"the replayed clean-up of `{method}` left other operators than torch")
    return counts


def used_attributes(module: Any, frozen: Any, methods: Sequence[str]) -> set[Path]:
    """Attributes with tensors that calls read, after branches that depend on constants are decided."""
    used: set[Path] = set()
    for method in methods:
        graph = inlined(module, method)
        _make_constants(graph, module, frozen, tensors=False)
        for scope in scopes(graph):
            _Replay(scope.graph, Counter()).clean_up()
            used |= {path for path, node in scope.reads() if node.hasUses()}
    return used


def optimizations(frozen: Any, final: Any, methods: Sequence[str], *, numerics: bool) -> Counter[str]:
    """Count what the optimization of a frozen module did.

    Args:
        frozen: the result of torch._C._freeze_module; its graphs are changed here.
        final: the C++ module from torch.jit.freeze.
        methods: the frozen methods.
        numerics: the argument `optimize_numerics` of torch.jit.freeze.

    Raises:
        ReplayError: see there.
    """
    counts: Counter[str] = Counter()
    for method in methods:
        graph = frozen._get_method(method).graph
        replay = _Replay(graph, counts)
        if method == "forward":  # the pass takes a module, and only changes this method
            dropouts = _num_dropouts(replay.ops)
            _pass("remove_dropout")(frozen)
            replay = _Replay(graph, counts)
            replay.count(DROPOUT, dropouts - _num_dropouts(replay.ops))
        sliced = replay.ops["aten::slice"]
        _pass("concat_frozen_linear")(graph)
        replay = _Replay(graph, counts)
        replay.count(CONCAT, replay.ops["aten::slice"] - sliced)
        while numerics and sum([replay.run(name, change) for name, change in NUMERIC_PASSES.items()]) > 0:
            pass
        expected = operators(final._get_method(method).graph)
        replay.count(DROPOUT, _num_dropouts(replay.ops) - _num_dropouts(expected))
        if _but(replay.ops, *_DROPOUTS) != _but(expected, *_DROPOUTS):
            raise ReplayError(f"the replayed optimization of `{method}` left other operators than torch")
    return counts


def optimizations_at_load(final: Any, methods: Sequence[str]) -> Counter[str]:
    """Count what torch.jit.optimize_for_inference would do to a frozen module, which stays unchanged.

    Raises:
        ReplayError: torch lacks a pass.
    """
    counts: Counter[str] = Counter()
    for method in methods:
        graph = final._get_method(method).graph.copy()
        _pass("fuse_frozen_conv_add_relu")(graph)
        counts[FUSED] += sum(count for kind, count in operators(graph).items() if "cudnn_convolution" in kind)
        _pass("convert_frozen_ops_to_mkldnn")(graph)
        linears = graph.findAllNodes("aten::linear")
        moved = sum(node.inputsAt(1).node().kind() == "prim::ConstantMKLDNNTensor" for node in linears)
        counts[MKLDNN] += len(graph.findAllNodes("prim::mkldnn_convolution")) + moved
        num_linears = len(linears)
        del linears  # the next pass destroys some of these nodes
        _pass("transpose_frozen_linear")(graph)
        counts[TRANSPOSED] += num_linears - len(graph.findAllNodes("aten::linear"))
    return counts


class _Replay:
    """Runs passes on a graph and counts the operators that each removed.

    Attributes:
        ops: the current operators of the graph.
    """

    def __init__(self, graph: Any, counts: Counter[str]) -> None:
        self.ops = operators(graph)
        self._graph, self._counts = graph, counts

    def run(self, name: str, change: str | None = None) -> int:
        """Run a pass; return the number of operators it removed, and count it as `change`."""
        before = self.ops.total()
        _pass(name)(self._graph)
        self.ops = operators(self._graph)
        removed = before - self.ops.total()
        if change:
            self.count(change, removed)
        return removed

    def count(self, change: str, count: int) -> None:
        if count > 0:
            self._counts[change] += count

    def clean_up(self) -> None:
        """Run the passes of C++'s runOptimization, after the one for autocast."""
        self.count(CASTS, -self.run("autocast"))
        self.run("dce_graph", DEAD)
        self.run("cse", MERGED)
        self.run("peephole", SIMPLIFIED)
        self._propagate_constants()
        _pass("constant_pooling")(self._graph)
        if self._unroll():
            self.run("remove_mutation", APPENDED)
            self.run("peephole", SIMPLIFIED)
            self._propagate_constants()
        self.run("cse", MERGED)

    def _propagate_constants(self) -> None:
        num_branches = self.ops["prim::If"]
        removed = self.run("constant_propagation")
        branches = num_branches - self.ops["prim::If"]
        self.count(BRANCHES, branches)
        self.count(COMPUTED_OR_DEAD if branches else COMPUTED, removed - branches)

    def _unroll(self) -> bool:
        before = len(self._graph.findAllNodes("prim::Loop"))
        self.run("constant_loop_unrolling")
        unrolled = before - len(self._graph.findAllNodes("prim::Loop"))
        self.count(UNROLLED, unrolled)
        return unrolled != 0


def _pass(name: str) -> Callable[[Any], Any]:
    found: Callable[[Any], Any] | None = getattr(torch._C, f"_jit_pass_{name}", None)
    if found is None:
        raise ReplayError(f"torch {torch.__version__} has no pass {name}")
    return found


def _make_constants(graph: Any, module: Any, frozen: Any, *, tensors: bool) -> None:
    """Replace reads of attributes that freezing made constants; with `tensors` also of those with tensors.

    Shapes recorded by a trace are erased first, because they are those of one example.
    """
    for scope in scopes(graph):
        _pass("erase_shape_information")(scope.graph)
        for path, node in list(scope.reads()):
            value = attribute_of(module, path)
            if has_attribute(frozen, path) or (tensors_in(value) and not tensors):
                continue
            with scope.graph.insert_point_guard(node):
                constant = scope.graph.insertConstant(value.detach() if isinstance(value, Tensor) else value)
            node.output().replaceAllUsesWith(constant)


def _num_dropouts(ops: Counter[str]) -> int:
    return sum(ops[kind] for kind in _DROPOUTS)


def _but(found: Counter[str], *kinds: str) -> dict[str, int]:
    return {kind: count for kind, count in found.items() if count and kind not in kinds}
