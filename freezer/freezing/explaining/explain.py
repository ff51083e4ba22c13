"""Explain the drift of a recipe: at which stage and node it enters. READ THIS FIRST.

Every form of the model up to the generation of code is a graph that Python runs, so the stage needs
no build. Nodes are matched with those of the exported program, whose values in float64 and in
eager's precision are the reference. A build with further outputs is made only where the engine
itself is the first stage that differs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from freezer.artifact.explanation import MOST, NO_ERROR, WRONG, Explanation, NodeScore, StageScore
from freezer.errors import first_line
from freezer.files import scratch_folder
from freezer.freezing.capture import Attempt, Repair, export_at
from freezer.freezing.diagnostics import quiet, sentence
from freezer.freezing.drift import Call, DriftReport, Gate, Reference
from freezer.freezing.explaining.reproduction import folded_before, write_reproduction
from freezer.freezing.explaining.stages import Stage, graph_stage, stages_of
from freezer.freezing.explaining.values import ROUNDING, GraphReference, error_of, module_of, score
from freezer.freezing.models import Subject, call_source, is_large
from freezer.freezing.recipes import EXPORTS, RECIPES, made_for
from freezer.freezing.target import Target
from freezer.runtime.tensors import in_double

logger = logging.getLogger("coldpress")

CAPTURE = "capture"

LIMIT_S = 60.0
"""Time in seconds after which no further stage is run."""

BUILD_S = 15.0
"""Time in seconds that must be left for each build of a stage."""


def explain_drift(
    subject: Subject,
    recipe: str,
    target: Target,
    reference: Reference,
    drift: DriftReport,
    gate: Gate,
) -> Explanation | None:
    """Explain why a candidate does not pass the gate, with the input set that drifts most.

    Returns:
        None where that is not possible: the model keeps state, draws random numbers, is large or on
        a GPU, or torch.export does not take it.
    """
    failed = [row for row in drift.rows if row.problem]
    simple = reference.deterministic and not reference.stateful
    if not failed or not simple or recipe not in RECIPES:
        return None
    if target.device.type != "cpu" or is_large(subject.model):
        return None
    worst = max(failed, key=lambda row: MOST if row.error_ratio is None else row.error_ratio)
    call = reference.singles[worst.set_index]
    try:
        return explain_recipe(
            subject,
            recipe,
            target,
            call,
            error_ratio_max=gate.error_ratio_max,
        )
    except Exception as error:  # of torch or an engine, about what the builds took
        logger.info("%s: the drift cannot be explained: %s", recipe, sentence(error, "run"))
        return None


def explain_recipe(
    subject: Subject,
    recipe: str,
    target: Target,
    call: Call,
    *,
    error_ratio_max: float = ROUNDING,
    limit_s: float = LIMIT_S,
    reproduction: Path | None = None,
) -> Explanation:
    """Explain the drift of a recipe with one input set.

    Args:
        subject: a model without state that draws no random numbers, on the CPU.
        recipe, target: what to explain.
        call: single call with the outputs of the reference and of eager.
        error_ratio_max: limit of the drift gate.
        limit_s: time after which no further stage is run.
        reproduction: a file to write that reproduces the error, its tensors beside it; or None.

    Raises:
        CaptureError, BuildError: torch.export or an engine does not take the model.
    """
    search = _Search(call, error_ratio_max, limit_s)
    program = _program(subject, call.set_index)
    source = GraphReference(program, list(subject.sets[call.set_index].tensors.values()))
    adapted = made_for(RECIPES[recipe], target.device_class.kind)
    with scratch_folder() as folder, torch.no_grad(), quiet("root"):
        first = graph_stage(CAPTURE, source.graph, source)
        search.run(chain([first], stages_of(program, source, adapted, target, folder)))
        nodes = search.worst.scores(search.moved) if search.runs else ()
        if search.worst is first and search.fails:
            nodes = _capture_scores(subject, source, call.set_index)
    guilty, repair, (capture, kind) = _guiltiest(nodes), None, adapted.ways[0]
    if guilty and search.worst is not first and capture in EXPORTS:
        repair = _repair(source, nodes, guilty)
    if guilty and search.fails and reproduction is not None:
        least = min(error_ratio_max, max(guilty.local.ratio / 2, 1.0))
        write_reproduction(reproduction, source, nodes, guilty, kind, least)
    return replace(search.explanation(recipe), nodes=nodes, guilty=guilty, repair=repair)


def _guiltiest(nodes: Sequence[NodeScore]) -> NodeScore | None:
    """The node with the largest local error; None if there is no error."""
    wrong = [node for node in nodes if node.local.ratio > 0]
    return max(wrong, key=lambda node: node.local.ratio, default=None)


class _Search:
    """Runs stages until one fails the gate.

    Attributes:
        worst: the stage that fails, or else the one that adds most.
        scores: error of the outputs after each stage.
        moved: source nodes that stages so far have changed without an error.
        num_builds: builds so far.
        note: what limits the search; empty if nothing.
        runs: whether the last stage runs.
    """

    worst: Stage

    def __init__(self, call: Call, error_ratio_max: float, limit_s: float) -> None:
        self._started = time.monotonic()
        self.scores: list[StageScore] = []
        self.moved: set[str] = set()
        self.num_builds = 0
        self.note = ""
        self.runs = True
        self._call = call
        self._limit = error_ratio_max
        self._deadline = self._started + limit_s
        self._growth = -1.0

    @property
    def fails(self) -> bool:
        """Whether a stage fails the gate."""
        return self.scores[-1].error.excess > 1

    def run(self, stages: Iterable[Stage]) -> None:
        """Run stages until one fails, or the time is over."""
        for stage in stages:
            room_s = self._deadline - time.monotonic()
            if room_s < stage.num_builds * BUILD_S:
                self.note = "; later stages were not run for lack of time"
                return
            self._add(stage)
            if self.fails:
                return
            self.moved |= stage.moved()

    def explanation(self, recipe: str) -> Explanation:
        """What was found, without nodes."""
        return Explanation(
            recipe=recipe,
            set_index=self._call.set_index,
            stages=tuple(self.scores),
            stage=self.worst.name,
            fails=self.fails,
            nodes=(),
            guilty=None,
            repair=None,
            num_builds=self.num_builds,
            wall_s=time.monotonic() - self._started,
            note=self.note,
        )

    def _add(self, stage: Stage) -> None:
        try:
            outputs, _ = stage.run(False)
        except Exception as failure:  # of an operator that a pass made wrong
            self.note, self.runs = f"; it does not run: {first_line(failure)}", False
            outputs = []
        answers = list(zip(self._call.reference, self._call.eager, outputs, strict=self.runs))
        errors = [error_of(r, e, c, limit=self._limit) for r, e, c in answers]
        error = max(errors, key=lambda each: each.excess, default=WRONG)
        before = self.scores[-1].error.ratio if self.scores else 0.0
        self.scores.append(StageScore(stage=stage.name, error=error))
        self.num_builds += stage.num_builds
        if error.excess > 1 or error.ratio - before > self._growth:
            self.worst, self._growth = stage, error.ratio - before


def _program(subject: Subject, set_index: int) -> ExportedProgram:
    """The exported program of a subject for one input set."""
    input_set = subject.sets[set_index]
    if subject.scripted:
        attempt = Attempt(subject, input_set.point or None)
        program: ExportedProgram = attempt.capture("convert").program
        return program
    return export_at(subject, input_set)


def _capture_scores(
    subject: Subject, source: GraphReference, set_index: int
) -> tuple[NodeScore, ...]:
    """Scores of the exported program against the results of the model's own modules, at the last
    node of each module.
    """
    model = subject.fresh()
    results = {}

    def keep(path: str, _: object, __: object, value: object) -> None:
        if isinstance(value, Tensor):
            results[path] = value.detach().clone()

    for path, module in model.named_modules():
        module.register_forward_hook(partial(keep, path))
    call_source(model, subject.spec, subject.sets[set_index].cloned())
    last = {module_of(node): node for node in source.graph.graph.nodes if node.name in source.eager}
    scores: list[NodeScore] = []
    for path, node in last.items():
        if path not in results:
            continue
        result = results[path]
        error = error_of(in_double(result), result, source.eager[node.name])
        is_first = all(other.accumulated.excess <= 1 for other in scores)
        scores.append(score(node, error if is_first else NO_ERROR, error))
    return tuple(scores)


def _repair(source: GraphReference, nodes: Sequence[NodeScore], guilty: NodeScore) -> Repair | None:
    """What may help for a node: not to fold it into the one before, if that has no result of its
    own any more; or else float64.
    """
    if folded_before(source, nodes, guilty.node) is not None:
        return "apart"
    return "float64" if source.eager[guilty.node].dtype is torch.float32 else None
