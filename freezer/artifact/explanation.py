"""Where the drift of a candidate enters: the record, in words, as a table and as a plot."""

from __future__ import annotations

import html
import math
from typing import Literal

from freezer.codec import frozen

NUMERICS = "optimize_numerics"
"""The option of torch.jit.freeze that folds batch norms, and the stage of its effect."""

ADVICE = {
    "apart": "keep it from being folded into the operator before",
    "float64": "compute it in float64",
    None: "use another recipe, or write it in other operations",
}
"""What to try, by repair."""

WIDTH = 640

MAX_NODES = 12
"""Rows of the table of nodes."""


MOST = 1e30
"""Stands for an infinite error, which JSON lacks."""


@frozen
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


@frozen
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


@frozen
class StageScore:
    """Error of the outputs after a stage."""

    stage: str
    error: Error


@frozen
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
        if self.stage == NUMERICS:
            return "torchscript-exact does without this step"
        return ADVICE[self.repair]

    def table(self) -> str:
        """The stages and the nodes with the largest errors, as text."""
        lines = [f"{'error ratio':>11}  stage"]
        for score in self.stages:
            mark = "  <-" if score.stage == self.stage else ""
            lines.append(f"{score.error.ratio:11.3g}  {score.stage}{mark}")
        lines += ["", f"{'alone':>11} {'in all':>9}  node, module, line"]
        by_error = sorted(self.nodes, key=lambda node: node.local.ratio, reverse=True)
        for node in self.nodes:
            if node in by_error[:MAX_NODES]:
                mark = "  <-" if node == self.guilty else ""
                where = ", ".join(filter(None, [node.node, node.module, node.line]))
                errors = f"{node.local.ratio:11.3g} {node.accumulated.ratio:9.3g}"
                lines.append(f"{errors}  {where}{mark}")
        return "\n".join(lines)

    def text(self) -> str:
        """The sentence and the table."""
        run = f"input set {self.set_index}, {self.num_builds} builds, {self.wall_s:.1f} s"
        return f"{self.recipe}: {self.sentence}\n({run})\n\n{self.table()}\n"

    def svg(self) -> str:
        """A plot of both errors over the nodes, from 1e-16 to 1 of the rms."""
        step = WIDTH / max(len(self.nodes), 1)
        dots, line = [], []
        for index, node in enumerate(self.nodes):
            x = (index + 0.5) * step
            color = "#c00" if node == self.guilty else "#37a"
            tip = html.escape(f"{node.node} {node.module}: {node.local.relative:.3g}")
            dots.append(
                f'<circle cx="{x:.1f}" cy="{_height(node.local)}" r="4" fill="{color}">'
                f"<title>{tip}</title></circle>"
            )
            line.append(f"{x:.1f},{_height(node.accumulated)}")
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -20 {WIDTH} 200" font-size="11"'
            ' role="img"><text y="-8">error as a share of the rms, 1 at the top, 1e-16 at the'
            f" bottom: dots local, line in all</text>{''.join(dots)}"
            f'<polyline points="{" ".join(line)}" fill="none" stroke="#333"/></svg>'
        )


def _height(error: Error) -> int:
    """Vertical place of an error in the plot, on a logarithmic scale."""
    return round(-10 * math.log10(min(max(error.relative, 1e-16), 1.0)))
