"""Mixed precision: the nodes of a model that int8 leaves in floating point, as few as keep the
budget on samples that no judge sees, and answer extremes.

Convolutions and matrix products are ranked once, by what the error of each alone in OpenVINO's int8
adds to the outputs where the whole model fails. The shortest prefix that passes takes about log2 of
their number builds for OpenVINO, the fastest. Other engines leave out the same nodes.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import Graph

from freezer.artifact import PayloadKind
from freezer.errors import BuildError, first_line
from freezer.files import scratch_folder
from freezer.freezing.capture import Captured
from freezer.freezing.drift import Extreme, extremes_of
from freezer.freezing.explaining import GraphReference, run_openvino
from freezer.freezing.lowering import LOWERINGS, int8_model
from freezer.freezing.models import Subject
from freezer.freezing.recipes import RECIPES, Recipe, Settings
from freezer.freezing.target import Target
from freezer.runtime.held_out import HeldOut, judge_answers
from freezer.runtime.loaders import LOADERS
from freezer.runtime.tensors import leaves_of, tensors_bytes
from freezer.spec import unflatten

logger = logging.getLogger("coldpress")

KEPT_NODES = "kept_nodes"
"""Setting of a recipe: nodes of the exported program that stay in floating point."""

FOUND: WeakKeyDictionary[HeldOut, Sequence[str]] = WeakKeyDictionary()
"""What a search found, by its samples: recipes and shapes share it."""

INT8 = "int8"
_SETTINGS = RECIPES["openvino-int8"].settings

_PRODUCT = re.compile("conv|linear|mm|matmul|einsum|attention|lstm|gru")
"""Part of the names of nodes that are convolutions or matrix products."""

_NUM_CANDIDATES = 6
"""Recipes of a lower precision for CPUs: the most that share the confidence of a budget."""

_KEPT_BYTES = 256 * 1024 * 1024
"""Size of eager's answers after which no further sample is searched with."""


def keeping(recipe: Recipe, nodes: Sequence[str]) -> Recipe:
    """The recipe with nodes that stay in floating point."""
    return replace(recipe, settings={**recipe.settings, KEPT_NODES: list(nodes)})


@dataclass(frozen=True, kw_only=True)
class NodeSearch:
    """Search of the nodes of a program that stay in floating point.

    Attributes:
        captured: the program, with samples for calibration.
        samples: the search samples: inputs of the program, in order.
        subject: has the extremes, at which errors are judged apart.
        held_out: has the budget, and the labels of the search samples.
        target: device class and thread count of the builds.
    """

    captured: Captured
    samples: Sequence[Sequence[Tensor]]
    subject: Subject
    held_out: HeldOut
    target: Target

    @cached_property
    def _eager(self) -> list[Any]:
        module = self.captured.program.module(check_guards=False)
        answers = list[Any]()
        for inputs in self.samples:
            with torch.no_grad():
                answers.append(module(*inputs))
            if len(answers) * tensors_bytes(answers[0]) > _KEPT_BYTES:
                break
        return answers

    @cached_property
    def _extremes(self) -> list[Extreme]:
        """Extremes of the program's sizes."""
        found = extremes_of(self.subject.on_host, False, list(map(leaves_of, self._eager)))
        shapes = _shapes(self.samples[0])
        return [
            extreme
            for extreme in found
            if _shapes(extreme.inputs.values()) == shapes and not extreme.missing
        ]

    def fails_at(
        self, path: Path, kind: PayloadKind, settings: Settings
    ) -> Sequence[Tensor] | None:
        """Inputs at which a payload would fail if the judged samples were like the search samples;
        None if it would pass.
        """
        run = LOADERS[kind](path, settings)
        if not self._keeps(run(*inputs) for inputs in self.samples[: len(self._eager)]):
            return self.captured.calibration[0]
        for extreme in self._extremes:
            inputs = list(extreme.inputs.values())
            try:
                passes = extreme.problem(leaves_of(run(*inputs)), INT8) is None
            except Exception:  # where eager answers; the judge says what the engine raised
                passes = False
            if not passes:
                return inputs
        return None

    def _keeps(self, answers: Iterable[Any]) -> bool:
        held_out, eager = self.held_out, self._structured(self._eager)
        repeated = islice(cycle(held_out.search[: len(eager)]), len(held_out.judged))
        judged = judge_answers(
            held_out,
            tuple(repeated),
            cycle(eager),
            cycle(self._structured(answers)),
            _NUM_CANDIDATES,
        )
        return judged.problem is None

    def _structured(self, answers: Iterable[Any]) -> list[Any]:
        """Answers as the model gives them: a program's are flat."""
        return [unflatten(self.subject.structure, leaves_of(answer)) for answer in answers]

    def exact_nodes(self, at: Sequence[Tensor]) -> Sequence[str]:
        """The fewest of the worst nodes without which OpenVINO passes; none if it fails even with a
        single product in int8, or is not available.

        Args:
            at: inputs at which the whole model fails.
        """
        if not self._keeps(self._eager):
            return ()  # there are too few samples for any answers
        try:
            prefixes = list(accumulate(_worst_first(self.captured, at)))[:-1]
        except Exception as error:  # of engines, or of an operator that float64 lacks
            logger.warning("nodes to keep in float are not searched: %s", first_line(error))
            return ()
        first = bisect_left(prefixes, True, key=self._keeps_without)
        return next(iter(prefixes[first:]), ())

    def _keeps_without(self, exact: Sequence[str]) -> bool:
        lowering = LOWERINGS["openvino"]
        captured = replace(self.captured, exact=exact)
        with scratch_folder() as folder:
            path = folder / f"searched{lowering.SUFFIX}"
            with suppress(BuildError):  # no product is left in int8
                lowering.build(captured, path, self.target, _SETTINGS)
                return self.fails_at(path, "openvino", _SETTINGS) is None
        return False


def _shapes(tensors: Iterable[Tensor]) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors]


def _worst_first(captured: Captured, at: Sequence[Tensor]) -> list[list[str]]:
    """The products of a program, those first whose error alone adds most to the outputs at some
    inputs; each with the nodes between it and the products before, whose results the
    engine quantizes for it.
    """
    graph = captured.program.graph
    model, names = int8_model(captured)
    reference = GraphReference(captured.program, at)
    values = run_openvino(model, reference, names, _SETTINGS)[1]
    effects = reference.effects(
        {
            name: value
            for name, value in values.items()
            if _PRODUCT.search(" ".join(_with_operands(graph, name, values)))
        }  # also of what an engine fused with a product
    )
    order = sorted(effects, key=effects.__getitem__, reverse=True)
    return [_with_operands(graph, name, effects) for name in order]


def _with_operands(graph: Graph, name: str, known: Collection[str]) -> list[str]:
    """A node and those before it, up to known ones."""
    found, seen = list[str](), set(known)
    waiting = [node for node in graph.nodes if node.name == name]
    while waiting:
        node = waiting.pop()
        found.append(node.name)
        for operand in node.all_input_nodes:
            if operand.op == "call_function" and operand.name not in seen:
                seen.add(operand.name)
                waiting.append(operand)
    return found
