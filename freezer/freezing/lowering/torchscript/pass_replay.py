"""The passes of torch.jit.freeze, run one by one on copies of the graphs, so that what each did can be counted.

torch.jit.freeze is two steps in C++, neither of which says what it did:

    _freeze_module                    attributes become constants, then a clean-up (runOptimization in graph_executor.cpp)
    _jit_pass_optimize_frozen_graph   dropouts, batch norms, ... (frozen_graph_optimizations.cpp)

Here the same passes run in the same order. The operators that are left must be those that torch itself left: where they are not, as
in another torch whose passes are others, nothing is told by name. Weights are shared with the module, not copied; what folding
computes is held twice meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from freezer.artifact.freezing_report import Change
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
"""Passes of optimize_numerics, in the order that torch repeats until nothing changes."""

FUSED, TRANSPOSED = "convolutions fused with add and relu", "linear layers pretransposed"
MKLDNN = "convolutions and linear layers moved to oneDNN's layouts"


class UntoldError(Exception):
    """What was done cannot be told: the replay did not end where torch did, or this torch lacks a pass; the message says which."""


class _Counts:
    """Counts by name, in the order in which they first came."""

    def __init__(self) -> None:
        self._found: dict[str, int] = {}

    def add(self, name: str, count: int) -> None:
        if count > 0:
            self._found[name] = self._found.get(name, 0) + count

    def changes(self) -> tuple[Change, ...]:
        return tuple(Change(name=name, count=count) for name, count in self._found.items())


def clean_up(module: Any, frozen: Any, methods: Sequence[str]) -> tuple[Change, ...]:
    """What making attributes constants, and the clean-up after it, did to the graphs.

    Args:
        module: the C++ module before it was frozen.
        frozen: what torch._C._freeze_module made of it, before any optimization.
        methods: that were frozen.

    Raises:
        UntoldError: see there.
    """
    counts = _Counts()
    for method in methods:
        graph = inlined(module, method)
        _make_constants(graph, module, frozen, tensors=True)
        for scope in scopes(graph):
            _clean_up(_Replay(scope.graph, counts))
        replay, expected = _Replay(graph, counts), operators(frozen._get_method(method).graph)
        if _but(replay.ops, "aten::detach") != _but(expected, "aten::detach"):
            _pass("lower_all_tuples")(graph)  # torch lowers simple ones alone; the operators that then have no use are the same
            replay.run("dce_graph", DEAD)
        left = replay.ops
        counts.add(NO_OPS, left["aten::detach"] - expected["aten::detach"])
        if _but(left, "aten::detach") != _but(expected, "aten::detach"):
            raise UntoldError(f"the clean-up of `{method}` left other operators than its replay")
    return counts.changes()


def used_attributes(module: Any, frozen: Any, methods: Sequence[str]) -> set[Path]:
    """Tensors, and what holds tensors, that calls read, once the branches are gone that frozen numbers and flags decide."""
    used: set[Path] = set()
    for method in methods:
        graph = inlined(module, method)
        _make_constants(graph, module, frozen, tensors=False)
        for scope in scopes(graph):
            _clean_up(_Replay(scope.graph, None))
            used |= {path for path, node in scope.reads() if node.hasUses()}
    return used


def optimizations(frozen: Any, final: Any, methods: Sequence[str], *, numerics: bool) -> tuple[Change, ...]:
    """What optimizing a frozen module did.

    Args:
        frozen: what torch._C._freeze_module made; its graphs are changed here.
        final: the C++ module that torch.jit.freeze gave.
        methods: that were frozen.
        numerics: whether it was told to optimize numerics.

    Raises:
        UntoldError: see there.
    """
    counts = _Counts()
    for method in methods:
        graph = frozen._get_method(method).graph
        before = _num_dropouts(graph)
        if method == "forward":  # the pass takes a module, and looks at this method alone
            _pass("remove_dropout")(frozen)
        counts.add(DROPOUT, before - _num_dropouts(graph))
        sliced = len(graph.findAllNodes("aten::slice"))
        _pass("concat_frozen_linear")(graph)
        counts.add(CONCAT, len(graph.findAllNodes("aten::slice")) - sliced)
        replay = _Replay(graph, counts)
        while numerics and sum(replay.run(name, told) for name, told in NUMERIC_PASSES.items()) > 0:
            pass
        left, expected = replay.ops, operators(final._get_method(method).graph)
        counts.add(DROPOUT, sum(left[kind] - expected[kind] for kind in _DROPOUTS))
        if _but(left, *_DROPOUTS) != _but(expected, *_DROPOUTS):
            raise UntoldError(f"the optimization of `{method}` left other operators than its replay")
    return counts.changes()


def optimizations_at_load(final: Any, methods: Sequence[str]) -> tuple[Change, ...]:
    """What torch.jit.optimize_for_inference does to a frozen module, which is left as it is.

    Raises:
        UntoldError: this torch lacks a pass.
    """
    counts = _Counts()
    for method in methods:
        graph = final._get_method(method).graph.copy()
        _pass("fuse_frozen_conv_add_relu")(graph)
        counts.add(FUSED, sum(count for kind, count in operators(graph).items() if "cudnn_convolution" in kind))
        _pass("convert_frozen_ops_to_mkldnn")(graph)
        linears = graph.findAllNodes("aten::linear")
        moved = sum(node.inputsAt(1).node().kind() == "prim::ConstantMKLDNNTensor" for node in linears)
        counts.add(MKLDNN, len(graph.findAllNodes("prim::mkldnn_convolution")) + moved)
        num_linears = len(linears)
        del linears  # the next pass destroys some of these nodes
        _pass("transpose_frozen_linear")(graph)
        counts.add(TRANSPOSED, num_linears - len(graph.findAllNodes("aten::linear")))
    return counts.changes()


class _Replay:
    """Passes on one graph, and how many operators each took away.

    Attributes:
        ops: the operators that the graph has now; none where nobody counts.
    """

    def __init__(self, graph: Any, counts: _Counts | None) -> None:
        self.graph = graph
        self.ops: Counter[str] = Counter() if counts is None else operators(graph)
        self._counts = counts

    def run(self, name: str, told: str) -> int:
        """Run a pass; how many operators it took away, which is counted as `told`."""
        before = self.ops.total()
        self._run(name)
        self.count(told, before - self.ops.total())
        return before - self.ops.total()

    def propagate_constants(self) -> None:
        before = self.ops
        self._run("constant_propagation")
        branches = before["prim::If"] - self.ops["prim::If"]
        self.count(BRANCHES, branches)
        self.count(COMPUTED_OR_DEAD if branches else COMPUTED, before.total() - self.ops.total() - branches)

    def unroll(self) -> bool:
        """Whether loops were unrolled."""
        before = len(self.graph.findAllNodes("prim::Loop"))
        self._run("constant_loop_unrolling")
        after = len(self.graph.findAllNodes("prim::Loop"))
        self.count(UNROLLED, before - after)
        return before != after

    def count(self, told: str, count: int) -> None:
        if self._counts is not None:
            self._counts.add(told, count)

    def _run(self, name: str) -> None:
        _pass(name)(self.graph)
        if self._counts is not None:
            self.ops = operators(self.graph)


def _clean_up(replay: _Replay) -> None:
    """What C++'s runOptimization does to a graph whose attributes are constants, with the pass for autocast before it."""
    replay.count(CASTS, -replay.run("autocast", CASTS))
    replay.run("dce_graph", DEAD)
    replay.run("cse", MERGED)
    replay.run("peephole", SIMPLIFIED)
    replay.propagate_constants()
    _pass("constant_pooling")(replay.graph)
    if replay.unroll():
        replay.run("remove_mutation", APPENDED)
        replay.run("peephole", SIMPLIFIED)
        replay.propagate_constants()
    replay.run("cse", MERGED)


def _pass(name: str) -> Callable[[Any], Any]:
    found: Callable[[Any], Any] | None = getattr(torch._C, f"_jit_pass_{name}", None)
    if found is None:
        raise UntoldError(f"torch {torch.__version__} has no pass {name}")
    return found


def _make_constants(graph: Any, module: Any, frozen: Any, *, tensors: bool) -> None:
    """Put constants in place of the attributes that freezing made constants; of those that hold no tensors, or of all.

    What a trace saw of its one example is forgotten first: it says nothing of others. The constants' own shapes are known.
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


def _num_dropouts(graph: Any) -> int:
    return sum(len(graph.findAllNodes(kind)) for kind in _DROPOUTS)


def _but(found: Counter[str], *kinds: str) -> dict[str, int]:
    return {kind: count for kind, count in found.items() if count and kind not in kinds}
