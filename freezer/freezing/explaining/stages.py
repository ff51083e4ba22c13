"""Stages of a recipe: the forms of a model between its export and what an engine runs, each of
which can be run, and gives values of its nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule

from freezer.artifact.explanation import NUMERICS, Error, NodeScore
from freezer.codec import frozen
from freezer.freezing.capture import Captured
from freezer.freezing.explaining.engines import (
    run_onnx,
    run_openvino,
)
from freezer.freezing.explaining.values import (
    GraphReference,
    NodeValues,
    Run,
    error_of,
    graph_of,
    matches,
    run_graph,
)
from freezer.freezing.lowering import (
    decomposed,
    names_in,
    optimized,
    passes_of,
    run_with_outputs,
    to_onnx,
    to_openvino,
)
from freezer.freezing.recipes import Recipe, Settings
from freezer.freezing.target import Target
from freezer.runtime.loaders import torchscript_deprecations_silenced
from freezer.runtime.native import import_openvino

VANISHED = 100
"""An error this many times as large as in all operators that use the result is not one: the node
computes something else than before.
"""


@frozen
class Stage:
    """A form of a model.

    Attributes:
        name: of the pass, conversion or engine.
        source: values of the exported program.
        run: gives its outputs, and values by source node, for which an engine is built again: only
            if the argument is True.
        local: results of its operators, by source node, for the reference's values of their
            operands; None if only an engine runs it.
        num_builds: builds that it takes.
    """

    name: str
    source: GraphReference
    run: Callable[[bool], Run]
    local: Callable[[NodeValues], NodeValues] | None = None
    num_builds: int = 0

    def moved(self) -> set[str]:
        """Source nodes whose match computes something else, given that the outputs are right."""
        if self.local is None:
            return set()
        errors = errors_of(self.source, self.run(True)[1])
        return {name for name, error in errors.items() if error.excess > VANISHED}

    def scores(self, moved: set[str]) -> tuple[NodeScore, ...]:
        """The errors at its nodes, without those of `moved`, which compute something else."""
        values = self.run(True)[1]
        gone = moved | vanishing(self.source, values)
        kept = {name: value for name, value in values.items() if name not in gone}
        return self.source.scores(kept, self.local(kept) if self.local else None)


def graph_stage(name: str, graph: GraphModule, source: GraphReference) -> Stage:
    """The stage of a graph that Python runs."""
    found = matches(source.graph.graph, graph.graph)

    def run(_: bool) -> Run:
        outputs, values = run_graph(graph, source.inputs)
        return outputs, {node: values[own] for node, own in found.items() if own in values}

    def local(kept: NodeValues) -> NodeValues:
        exact = {found[node]: source.exact[node] for node in kept}
        _, values = run_graph(graph, source.inputs, exact)
        return {node: values[found[node]] for node in kept}

    return Stage(
        name=name,
        source=source,
        run=run,
        local=local,
    )


def errors_of(source: GraphReference, values: NodeValues) -> dict[str, Error]:
    """The error of each value, by source node."""
    return {
        name: error_of(source.exact[name], source.eager[name], value)
        for name, value in values.items()
        if name in source.eager
    }


def vanishing(source: GraphReference, values: NodeValues) -> set[str]:
    """Source nodes whose value is wrong, though no operator that uses it is: a pass moved part of
    the computation, or nothing depends on it.
    """
    errors = errors_of(source, values)
    gone = set()
    for node in source.graph.graph.nodes:
        error = errors.get(node.name)
        later = [errors[user.name].relative for user in node.users if user.name in errors]
        if error and error.excess > 1 and later and max(later) * VANISHED < error.relative:
            gone.add(node.name)
    return gone


def stages_of(
    program: ExportedProgram, source: GraphReference, recipe: Recipe, target: Target, folder: Path
) -> Iterator[Stage]:
    """The stages of a recipe in order, from the exported program to what runs.

    Args:
        program: the exported program of the source.
        source: its values.
        recipe: a recipe, adapted to the target.
        target: the device class and thread count.
        folder: an existing folder for temporary files.
    """
    kind = recipe.ways[0][1]
    makers = {
        "inductor": _of_inductor,
        "onnxruntime": _of_onnx,
        "openvino": _of_openvino,
        "torchscript": _of_torchscript,
    }
    if kind in makers and not recipe.portable:
        yield from makers[kind](program, source, recipe.settings, target, folder)


def _of_inductor(
    program: ExportedProgram,
    source: GraphReference,
    settings: Settings,
    target: Target,
    folder: Path,
) -> Iterator[Stage]:
    captured = Captured(name="export", program=program, convention="flat")
    for name, graph in passes_of(captured, folder, target, settings):
        yield graph_stage(name, graph, source)

    @cache
    def built() -> Run:
        found = {}

        def choose(graph: Graph) -> list[str]:
            found.update(matches(source.graph.graph, graph))
            return list(found.values())

        values = run_with_outputs(captured, source.inputs, choose, folder, target, settings)
        num = len(source.eager_outputs)
        return values[:num], dict(zip(found, values[num:], strict=True))

    yield Stage(name="generated code", source=source, run=lambda _: built(), num_builds=1)


def _of_onnx(
    program: ExportedProgram,
    source: GraphReference,
    settings: Settings,
    target: Target,
    folder: Path,
) -> Iterator[Stage]:
    with decomposed(program) as made:
        model = to_onnx(program)
    yield graph_stage("decomposition", graph_of(made[-1]), source)
    names = names_in(made)

    def stage(name: str, model: Any, optimize: bool) -> Stage:
        def run(in_full: bool) -> Run:
            return run_onnx(model, source, names if in_full else {}, settings, optimize=optimize)

        return Stage(name=name, source=source, run=run, num_builds=1)

    yield stage("conversion to ONNX", model, False)
    smaller = optimized(model, folder, settings)
    yield stage("ONNX Runtime's graph optimizations", smaller, False)
    yield stage("ONNX Runtime", smaller, True)


def _of_openvino(
    program: ExportedProgram,
    source: GraphReference,
    settings: Settings,
    target: Target,
    folder: Path,
) -> Iterator[Stage]:
    openvino = import_openvino("this explanation needs OpenVINO")
    with decomposed(program) as made, torch.no_grad():
        model = to_openvino(program, openvino)
    names = names_in(made)
    yield graph_stage("decomposition", graph_of(made[-1]), source)

    def run(in_full: bool) -> Run:
        return run_openvino(model, source, names if in_full else {}, settings)

    yield Stage(name="OpenVINO", source=source, run=run, num_builds=2)


def _of_torchscript(
    program: ExportedProgram,
    source: GraphReference,
    settings: Settings,
    target: Target,
    folder: Path,
) -> Iterator[Stage]:
    with torchscript_deprecations_silenced(), torch.no_grad():
        traced = torch.jit.trace(source.graph, tuple(source.inputs), check_trace=False).eval()
        for name in ("trace", NUMERICS):
            frozen = torch.jit.freeze(
                traced,
                optimize_numerics=name == NUMERICS and settings[NUMERICS],
            )
            yield Stage(name=name, source=source, run=partial(_run_script, frozen, source))


def _run_script(frozen: Any, source: GraphReference, _: bool) -> Run:
    """Run a frozen TorchScript module, whose operators have no names."""
    return list(frozen(*(tensor.clone() for tensor in source.inputs))), {}
