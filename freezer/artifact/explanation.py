"""Where the drift of a candidate enters: the record, in words, as a table and as a plot."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MAX_NODES = 12
"""Rows of the table of nodes in a text."""


MOST = 1e30
"""Stands for an infinite error, which JSON lacks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Error:
    """Error of a tensor in the measure of the drift gate, each figure at most MOST, as where NaN,
    Inf, integers or bools differ.

    Attributes:
        relative: rmse as a share of the reference's rms.
        ratio: the error ratio, which is relative to eager's error in the same tensor.
        excess: rmse relative to the largest that passes the gate; above 1 it fails.
    """

    relative: float
    ratio: float
    excess: float


NO_ERROR = Error(relative=0.0, ratio=0.0, excess=0.0)
WRONG = Error(relative=MOST, ratio=MOST, excess=MOST)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeScore:
    """What one operator of the exported program adds to the error of a candidate.

    Attributes:
        node: name in the exported program.
        operator: the operator, such as `aten.batch_norm.default`.
        module: path of the module that calls it; empty for the model itself.
        line: the user's source line; None if it is unknown.
        local: error that the candidate's operator adds to exact inputs.
        accumulated: error of its output in the candidate's own stream.
    """

    node: str
    operator: str
    module: str
    line: str | None
    local: Error
    accumulated: Error


@dataclass(frozen=True, kw_only=True, slots=True)
class StageScore:
    """Error of the outputs after a stage."""

    stage: str
    error: Error


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Where the drift of a candidate enters.

    Attributes:
        recipe: name of the recipe.
        set_index: index of the input set that was run.
        stages: error of the outputs after each stage that ran, in order.
        stage: the first that fails the gate, or else the one that adds most.
        fails: whether it fails the gate.
        nodes: errors at each node of that stage, in the order of the exported program.
        guilty: the node with the largest local error; None if no node could be matched.
        repair: what may help for that node; None if nothing is known.
        num_builds: builds of engines that it took.
        wall_s: time that it took, in seconds.
        note: what limits it; empty if nothing.
    """

    recipe: str
    set_index: int
    stages: tuple[StageScore, ...]
    stage: str
    fails: bool
    nodes: tuple[NodeScore, ...]
    guilty: NodeScore | None
    repair: Literal["apart", "float64"] | None
    num_builds: int
    wall_s: float
    note: str = ""

    @property
    def place(self) -> str:
        """The guilty place in a few words."""
        if self.guilty is None:
            return f"stage {self.stage!r}"
        node = self.guilty
        module = f" of module {node.module!r}" if node.module else ""
        line = f" ({node.line})" if node.line else ""
        return f"node {node.node!r} ({node.operator}){module}{line} in stage {self.stage!r}"

    @property
    def sentence(self) -> str:
        """One sentence that names the guilty place, and what to try."""
        if not self.fails:
            return f"the drift passes the gate; most of it enters at {self.place}"
        errors = ""
        if self.guilty is not None:
            local, total = self.guilty.local.ratio, self.guilty.accumulated.ratio
            errors = f", error_ratio {local:.3g} alone and {total:.3g} in all"
        return f"the drift enters at {self.place}{errors}; {self.advice}{self.note}"

    @property
    def advice(self) -> str:
        """What to try."""
        if self.repair == "apart":
            return "keep it from being folded into the operator before (a repaired build does so)"
        if self.repair == "float64":
            return "compute it in float64 (a repaired build does so)"
        return "use another recipe, or write it in other operations"

    def table(self) -> str:
        """The stages and the nodes with the largest errors, as text."""
        lines = [f"{'stage':36} {'error ratio':>11}"]
        for score in self.stages:
            mark = "  <- drift enters" if score.stage == self.stage else ""
            lines.append(f"{score.stage[:36]:36} {_number(score.error.ratio):>11}{mark}")
        lines += ["", f"{'node':28} {'local':>9} {'in all':>9}  module, line"]
        shown = self._largest()
        for node in self.nodes:
            if node not in shown:
                continue
            mark = "  <-" if node == self.guilty else ""
            where = ", ".join(filter(None, [node.module, node.line]))
            figures = f"{_number(node.local.ratio):>9} {_number(node.accumulated.ratio):>9}"
            lines.append(f"{node.node[:28]:28} {figures}  {where}{mark}")
        hidden = len(self.nodes) - len(shown)
        if hidden:
            lines.append(f"({hidden} more nodes)")
        return "\n".join(lines)

    def _largest(self) -> Sequence[NodeScore]:
        by_error = sorted(self.nodes, key=lambda node: node.local.ratio, reverse=True)
        return by_error[:MAX_NODES]

    def text(self) -> str:
        """The sentence and the table."""
        run = f"input set {self.set_index}, {self.num_builds} builds, {self.wall_s:.1f} s"
        return f"{self.recipe}: {self.sentence}\n({run})\n\n{self.table()}\n"

    def svg(self) -> str:
        """A plot of both errors over the nodes, on a logarithmic scale."""
        width, height, left = 640, 220, 60
        values = [max(n.accumulated.relative, n.local.relative) for n in self.nodes]
        tops = [_log(value) for value in values]
        top, bottom = max(tops, default=0.0) + 0.5, min(tops, default=-8.0) - 1.5

        def y(value: float) -> float:
            share = (_log(value) - bottom) / (top - bottom)
            return height - 20 - min(max(share, 0.0), 1.0) * (height - 40)

        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            ' font-family="sans-serif" font-size="11" role="img">'
        ]
        for exponent in range(math.ceil(bottom), math.floor(top) + 1):
            level = y(10.0**exponent)
            parts.append(f'<text x="2" y="{level + 4:.1f}">1e{exponent}</text>')
            parts.append(
                f'<line x1="{left}" x2="{width}" y1="{level:.1f}" y2="{level:.1f}" stroke="#ddd"/>'
            )
        step = (width - left - 20) / max(len(self.nodes) - 1, 1)
        accumulated = []
        for index, node in enumerate(self.nodes):
            x = left + 10 + index * step
            accumulated.append(f"{x:.1f},{y(node.accumulated.relative):.1f}")
            color = "#c00" if node == self.guilty else "#37a"
            tip = html.escape(f"{node.node} {node.module}: local {node.local.relative:.3g}")
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y(node.local.relative):.1f}" r="4" fill="{color}">'
                f"<title>{tip}</title></circle>"
            )
        points = " ".join(accumulated)
        parts.append(f'<polyline points="{points}" fill="none" stroke="#333"/>')
        parts.append(
            f'<text x="{left + 10}" y="12">error relative to the rms: dots local, line in all'
            "</text></svg>"
        )
        return "".join(parts)


def _number(value: float) -> str:
    return f"{value:.3g}"


def _log(value: float) -> float:
    return math.log10(min(max(value, 1e-18), 1e18))
