"""The graph after each pass of Inductor, up to the generation of code: nothing is compiled."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from freezer.freezing.capture import Captured
from freezer.freezing.lowering.inductor.compilation import (
    Watched,
    compile_program,
    write_package,
)
from freezer.freezing.lowering.inductor.torch_patches import own_cache
from freezer.freezing.recipes import Settings
from freezer.freezing.target import Target
from freezer.runtime.loaders import LOADERS

DECOMPOSITION = "decomposition"
_PATTERNS = ("matrix fusion", "weight packing", "further patterns")
"""Stages of freezing; others have torch's name of the pass."""


class _Recorded(Watched):
    """Keeps a copy of the graph after each pass that changes it.

    Attributes:
        stages: name and graph of each stage; copies share their weights.
        finished: whether the last pass has run.
    """

    def __init__(self, captured: Captured) -> None:
        super().__init__(captured, beside=False)
        self.stages: list[tuple[str, GraphModule]] = []
        self.finished = False
        self._last = ""

    def begin(self, graph: Graph) -> None:
        """Keep the decomposed graph."""
        self.record(DECOMPOSITION, graph)

    def finish(self, graph: Graph) -> None:
        """Stop before code is generated."""
        self.finished = True
        raise InterruptedError("the last pass has run")

    def freeze(self, *args: Any) -> Any:
        """Freeze a program, whose tensors stay."""
        return self._freeze(*args)

    def record(self, name: str, graph: Graph) -> None:
        """Keep a copy of a graph if it changed."""
        module = graph.owning_module
        if module is None or not (self.stages or name == DECOMPOSITION):
            return
        text = _text(graph)
        if text != self._last:
            self._last = text
            again = sum(stage.startswith(name) for stage, _ in self.stages)
            name = f"{name} {again + 1}" if again else name
            self.stages.append((name, GraphModule(module, deepcopy(graph))))


def _text(graph: Graph) -> str:
    """Nodes with their arguments, and the identity of each constant."""
    lines = []
    for node in graph.nodes:
        constant = ""
        if node.op == "get_attr":
            constant = str(id(operator.attrgetter(str(node.target))(graph.owning_module)))
        lines.append(f"{node.name} {node.target} {node.args} {node.kwargs} {constant}")
    return "\n".join(lines)


def passes_of(
    captured: Captured, folder: Path, target: Target, settings: Settings
) -> list[tuple[str, GraphModule]]:
    """Name and graph of each stage of a program: the decomposed graph, and those after each pass
    that changes it.

    Fusions that only exist as generated code are left out.

    Args:
        captured, target, settings: see `build`.
        folder: an existing folder for temporary files.
    """
    recorded = _Recorded(captured)
    with own_cache(folder) as cache, torch.no_grad(), _observed(recorded):
        try:
            compile_program(captured, target, settings, cache, recorded)
        except Exception:
            if not recorded.finished:
                raise
    return recorded.stages


class _Extended(Watched):
    """Adds the results of chosen nodes to the outputs of the final graph."""

    def __init__(self, captured: Captured, choose: Callable[[Graph], Sequence[str]]) -> None:
        super().__init__(captured, beside=False)
        self._choose = choose

    def finish(self, graph: Graph) -> None:
        """Add outputs, after the last pass, so that none is left out for them."""
        nodes = {node.name: node for node in graph.nodes}
        output = graph.output_node()
        outputs: Any = output.args[0]
        output.args = ((*outputs, *(nodes[name] for name in self._choose(graph))),)


def run_with_outputs(
    captured: Captured,
    inputs: Sequence[Tensor],
    choose: Callable[[Graph], Sequence[str]],
    folder: Path,
    target: Target,
    settings: Settings,
) -> list[Tensor]:
    """Compile a program with further outputs, and call it once.

    Args:
        captured, target, settings: see `build`.
        inputs: inputs of the call.
        choose: names the nodes of the final graph whose results are returned, too.
        folder: an existing folder for temporary files.

    Returns:
        The outputs, and the results of those nodes.
    """
    with own_cache(folder) as cache, torch.no_grad():
        files = compile_program(captured, target, settings, cache, _Extended(captured, choose))
        package = folder / "explained.pt2"
        write_package(package, files)
        run = LOADERS["inductor"](package, settings)
        results: list[Tensor] = run(*(tensor.clone() for tensor in inputs))
    return results


@contextlib.contextmanager
def _observed(recorded: _Recorded) -> Iterator[None]:
    """Record the graph after each of Inductor's passes."""
    from torch._inductor import freezing, pattern_matcher
    from torch._inductor.fx_passes import freezing_patterns
    from torch.fx.passes.graph_transform_observer import GraphTransformObserver

    names = dict(zip(map(id, freezing_patterns.pass_patterns), _PATTERNS, strict=False))
    names[id(freezing_patterns.binary_folding_pass)] = "conv-batchnorm fold"
    run_pass = GraphTransformObserver.apply_graph_pass
    apply = pattern_matcher.PatternMatcherPass.apply
    fold = freezing.constant_fold

    def applied(patterns: Any, graph: Any) -> Any:
        result = apply(patterns, graph)
        changed = getattr(graph, "graph", graph)
        if id(patterns) in names:
            recorded.record(names[id(patterns)], changed)
        return result

    def folded(module: GraphModule, *args: Any) -> None:
        fold(module, *args)
        recorded.record("constant folding", module.graph)

    def observed(observer: Any, change: Callable[[Graph], Any]) -> Any:
        result = run_pass(observer, change)
        recorded.record(observer.passname, observer.gm.graph)
        return result

    with (
        mock.patch.object(pattern_matcher.PatternMatcherPass, "apply", applied),
        mock.patch.object(pattern_matcher.LoweringPatternEntry, "apply", return_value=None),
        mock.patch.object(freezing, "constant_fold", folded),
        mock.patch.object(GraphTransformObserver, "apply_graph_pass", observed),
    ):
        yield
