"""Mixed precision: the nodes of a model that int8 leaves in floating point, as few as keep the
budget on samples that no judge sees.

Convolutions and matrix products are ranked once, by what the error of each alone in OpenVINO's int8
adds to the outputs. The shortest prefix that keeps the budget takes about log2 of their number
builds for OpenVINO, the fastest. Other engines leave out the same nodes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import Graph

from freezer.artifact import PayloadKind
from freezer.errors import BuildError
from freezer.files import scratch_folder
from freezer.freezing.capture import Captured
from freezer.freezing.explaining import GraphReference, NodeValues, run_openvino
from freezer.freezing.lowering import LOWERINGS, int8_model
from freezer.freezing.recipes import RECIPES, Recipe, Settings
from freezer.freezing.target import Target
from freezer.runtime.accuracy import keeps_budget
from freezer.runtime.held_out import HeldOut, judge_answers
from freezer.runtime.loaders import LOADERS

KEPT_NODES = "kept_nodes"
"""Setting of a recipe: nodes of the exported program that stay in floating point."""

FOUND: WeakKeyDictionary[nn.Module, Sequence[str]] = WeakKeyDictionary()
"""What a search found, by model: recipes and shapes share it."""

_SETTINGS = RECIPES["openvino-int8"].settings

_PRODUCTS = ("conv", "linear", "mm", "matmul", "einsum", "attention", "lstm", "gru")
"""Parts of the names of nodes that are convolutions or matrix products."""

_NUM_RANKED = 2
"""Calibration samples on which nodes are ranked."""


def keeping(recipe: Recipe, nodes: Sequence[str]) -> Recipe:
    """The recipe with nodes that stay in floating point."""
    return replace(recipe, settings={**recipe.settings, KEPT_NODES: list(nodes)})


@dataclass(frozen=True, kw_only=True)
class NodeSearch:
    """Search of the nodes of a program that stay in floating point.

    Attributes:
        captured: the program, with samples for calibration.
        samples: the search samples: inputs of the program, in order.
        held_out: has the budget; a metric is not searched for.
        target: device class and thread count of the builds.
    """

    captured: Captured
    samples: Sequence[Sequence[Tensor]]
    held_out: HeldOut
    target: Target

    @cached_property
    def _eager(self) -> list[Sequence[Tensor]]:
        module = self.captured.program.module(check_guards=False)
        with torch.no_grad():
            return [module(*inputs) for inputs in self.samples]

    def keeps(self, path: Path, kind: PayloadKind, settings: Settings) -> bool:
        """Whether a payload keeps the budget on the search samples."""
        run = LOADERS[kind](path, settings)
        answers = (run(*inputs) for inputs in self.samples)
        judged = judge_answers(self.held_out, None, self._eager, answers, 1)
        return keeps_budget(judged.measured, self.held_out.accuracy.budget)

    def exact_nodes(self) -> Sequence[str]:
        """The fewest of the worst nodes without which OpenVINO keeps the budget; none if it breaks
        it even with a single product in int8.

        Raises:
            BuildError: OpenVINO or NNCF is missing, or does not take the model.
        """
        prefixes = list(accumulate(_worst_first(self.captured)))[:-1]
        index = bisect_left(prefixes, True, key=self._keeps_without)
        return prefixes[index] if index < len(prefixes) else ()

    def _keeps_without(self, exact: Sequence[str]) -> bool:
        lowering, captured = LOWERINGS["openvino"], replace(self.captured, exact=exact)
        with scratch_folder() as folder:
            path = Path(folder) / f"searched{lowering.SUFFIX}"
            with suppress(BuildError):  # no product is left in int8
                lowering.build(captured, path, self.target, _SETTINGS)
                return self.keeps(path, "openvino", _SETTINGS)
        return False


def _worst_first(captured: Captured) -> list[list[str]]:
    """The products of a program, those first whose error alone adds most to the outputs; each with
    the nodes between it and the products before, whose results the engine quantizes for it.
    """
    model, names = int8_model(captured)
    effects: defaultdict[str, float] = defaultdict(float)
    for inputs in captured.calibration[:_NUM_RANKED]:
        reference = GraphReference(captured.program, inputs)
        _, values = run_openvino(model, reference, names, _SETTINGS)
        products = _products(captured.program.graph, values)
        for name, effect in reference.effects(products).items():
            effects[name] += effect
    order = sorted(effects, key=effects.__getitem__, reverse=True)
    return [_with_operands(captured.program.graph, name, effects) for name in order]


def _products(graph: Graph, values: NodeValues) -> NodeValues:
    """The values of convolutions and matrix products, or of what an engine fused with one."""
    found = {}
    for name, value in values.items():
        parts = " ".join(_with_operands(graph, name, values))
        if any(word in parts for word in _PRODUCTS):
            found[name] = value
    return found


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
