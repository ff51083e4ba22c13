"""Stages of a recipe: the forms of a model between its export and what an engine runs, each of
which can be run, and gives values of its nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule

from freezer.artifact import Error, NodeScore
from freezer.freezing.capture import Captured
from freezer.freezing.explaining.engines import (
    Run,
    decomposed,
    names_in,
    run_onnx,
    run_openvino,
    run_torchscript,
)
from freezer.freezing.explaining.matching import by_source, matches
from freezer.freezing.explaining.values import NodeValues, Source, error_of, run_graph
from freezer.freezing.lowering import (
    optimized,
    passes_of,
    run_with_outputs,
    to_onnx,
    to_openvino,
)
from freezer.freezing.recipes import Recipe
from freezer.freezing.target import Target
from freezer.runtime.loaders import import_openvino, torchscript_deprecations_silenced

VANISHED = 100
"""An error this many times as large as in all operators that use the result is not one: the node
computes something else than before.
"""


class Stage(Protocol):
    """A form of a model.

    Attributes:
        name: of the pass, conversion or engine.
        num_builds: builds that its values take.
    """

    name: str
    num_builds: int

    def outputs(self) -> list[Tensor]:
        """Its outputs."""

    def moved(self) -> set[str]:
        """Source nodes whose match computes something else, given that the outputs are right."""

    def scores(self, moved: set[str]) -> tuple[NodeScore, ...]:
        """The errors at its nodes, without those of `moved`, which compute something else."""


class GraphStage:
    """A graph that Python runs."""

    num_builds = 0

    def __init__(self, name: str, graph: GraphModule, source: Source) -> None:
        self.name = name
        self.graph = graph
        self._source = source
        self._run: Run | None = None

    def _result(self) -> Run:
        if self._run is None:
            self._run = run_graph(self.graph, self._source.inputs)
        return self._run

    def outputs(self) -> list[Tensor]:
        """See `Stage`."""
        return self._result()[0]

    def moved(self) -> set[str]:
        """See `Stage`."""
        found = matches(self._source.graph.graph, self.graph.graph)
        errors = errors_of(self._source, by_source(found, self._result()[1]))
        return {name for name, error in errors.items() if error.excess > VANISHED}

    def found(self, moved: set[str]) -> dict[str, str]:
        """Its node for each source node."""
        found = matches(self._source.graph.graph, self.graph.graph)
        values = by_source(found, self._result()[1])
        gone = moved | vanishing(self._source, values)
        return {source: name for source, name in found.items() if source not in gone}

    def scores(self, moved: set[str]) -> tuple[NodeScore, ...]:
        """See `Stage`; local errors are those of its operators on the reference's inputs."""
        found = self.found(moved)
        exact = {name: self._source.exact[source] for source, name in found.items()}
        _, local = run_graph(self.graph, self._source.inputs, exact)
        accumulated = by_source(found, self._result()[1])
        return self._source.scores(accumulated, by_source(found, local))


class EngineStage:
    """A form that an engine runs.

    Attributes:
        name, num_builds: see `Stage`.
    """

    def __init__(
        self, name: str, run: Callable[[bool], Run], source: Source, num_builds: int = 0
    ) -> None:
        self.name = name
        self.num_builds = num_builds
        self._source = source
        self._run_engine = run

    def outputs(self) -> list[Tensor]:
        """See `Stage`."""
        return self._run_engine(False)[0]

    def moved(self) -> set[str]:
        """See `Stage`; later stages have names of their own."""
        return set()

    def scores(self, moved: set[str]) -> tuple[NodeScore, ...]:
        """See `Stage`."""
        _, values = self._run_engine(True)
        gone = moved | vanishing(self._source, values)
        return self._source.scores(
            {name: value for name, value in values.items() if name not in gone}
        )


def errors_of(source: Source, values: NodeValues) -> dict[str, Error]:
    """The error of each value, by source node."""
    known = {name: value for name, value in values.items() if name in source.eager}
    return {
        name: error_of(source.exact[name], source.eager[name], value)
        for name, value in known.items()
    }


def vanishing(source: Source, values: NodeValues) -> set[str]:
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
    program: ExportedProgram, source: Source, recipe: Recipe, target: Target, folder: Path
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
        yield from makers[kind](program, source, recipe, target, folder)


def _of_inductor(
    program: ExportedProgram, source: Source, recipe: Recipe, target: Target, folder: Path
) -> Iterator[Stage]:
    captured = Captured(name="export", program=program, convention="flat")
    stages = passes_of(captured, folder, target, recipe.settings)
    for name, graph in stages:
        yield GraphStage(name, graph, source)
    result: list[Run] = []

    def run(_: bool) -> Run:
        if not result:
            found: dict[str, str] = {}

            def choose(graph: Graph) -> list[str]:
                found.update(matches(source.graph.graph, graph))
                return list(found.values())

            values = run_with_outputs(
                captured, source.inputs, choose, folder, target, recipe.settings
            )
            num = len(source.eager_outputs)
            result.append((values[:num], dict(zip(found, values[num:], strict=True))))
        return result[0]

    yield EngineStage("generated code", run, source, num_builds=1)


def _of_onnx(
    program: ExportedProgram, source: Source, recipe: Recipe, target: Target, folder: Path
) -> Iterator[Stage]:
    with decomposed() as made:
        model = to_onnx(program)
    yield GraphStage("decomposition", _graph_of(made[-1]), source)
    names = names_in(made[-1])
    settings = recipe.settings

    def stage(name: str, model: Any, optimize: bool) -> Stage:
        def run(in_full: bool) -> Run:
            return run_onnx(model, source, names if in_full else None, settings, optimize=optimize)

        return EngineStage(name, run, source, num_builds=1)

    yield stage("conversion to ONNX", model, False)
    smaller = optimized(model, folder, settings)
    yield stage("ONNX Runtime's graph optimizations", smaller, False)
    yield stage("ONNX Runtime", smaller, True)


def _of_openvino(
    program: ExportedProgram, source: Source, recipe: Recipe, target: Target, folder: Path
) -> Iterator[Stage]:
    openvino = import_openvino("this explanation needs OpenVINO")
    with decomposed() as made, torch.no_grad():
        model = to_openvino(program, openvino)
    names = names_in(made[-1])
    yield GraphStage("decomposition", _graph_of(made[-1]), source)

    def run(in_full: bool) -> Run:
        return run_openvino(model, source, names if in_full else None, recipe.settings)

    yield EngineStage("OpenVINO", run, source, num_builds=2)


def _of_torchscript(
    program: ExportedProgram, source: Source, recipe: Recipe, target: Target, folder: Path
) -> Iterator[Stage]:
    with torchscript_deprecations_silenced(), torch.no_grad():
        traced = torch.jit.trace(source.graph, tuple(source.inputs), check_trace=False).eval()
        numerics = {"trace": False, "optimize_numerics": recipe.settings["optimize_numerics"]}
        for name, optimize in numerics.items():
            frozen = torch.jit.freeze(traced, optimize_numerics=optimize)
            yield EngineStage(name, partial(_run_script, frozen, source), source)


def _run_script(frozen: Any, source: Source, _: bool) -> Run:
    return run_torchscript(frozen, source)


def _graph_of(program: ExportedProgram) -> GraphModule:
    graph = program.module(check_guards=False)
    assert isinstance(graph, GraphModule)
    return graph
