"""Judge: validate and time all candidates of one model and device class side by side with eager,
and decide the verdict. READ THIS FIRST.

`STEPS` lists what happens in order; each step adds its part to the judgement.
docs/reference/contract.md has the rules.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from freezer.artifact import slower_than_eager
from freezer.compare import finite
from freezer.errors import FreezeError, JudgeError, first_line
from freezer.freezing.candidates import EVIDENCE, Candidate, build, repaired_recipe
from freezer.freezing.capture import Repair
from freezer.freezing.explaining import explain_drift
from freezer.freezing.in_hand import take
from freezer.freezing.judging.cold_start import measure_memory, measure_winner
from freezer.freezing.judging.finalists import time_again
from freezer.freezing.judging.incumbent import compare_with_incumbent, enter_incumbent
from freezer.freezing.judging.judgement import Incumbent, Judgement, Trial
from freezer.freezing.judging.payload_gains import point_figures
from freezer.freezing.judging.session import Session, TaskMetric
from freezer.freezing.judging.timed_cells import time_entrants, time_sizes, without_grad
from freezer.freezing.judging.trials import apply_gate, run_trial, sharing_budget
from freezer.freezing.judging.verdicts import decide, refuse_contradicted, serve_unmeasured
from freezer.freezing.recipes import RECIPES
from freezer.freezing.target import working_conditions
from freezer.runtime.devices import called_on

logger = logging.getLogger("coldpress")


def measure_quality(session: Session, judgement: Judgement) -> Judgement:
    """Apply the caller's own quality measure to eager and to the passing trials."""
    metric = session.task_metric
    if metric is None:
        return judgement

    def measured(trial: Trial) -> Trial:
        return replace(trial, task_metric=quality(trial.candidate.open(session.subject)))

    def quality(model: Callable[..., Any]) -> float | None:
        return quality_of(metric, called_on(model, session.subject.device))

    of_eager = quality(partial(without_grad, session.subject.fresh()))
    return replace(judgement.with_passing(measured), task_metric=of_eager)


def time_other_sizes(session: Session, judgement: Judgement) -> Judgement:
    """Add the latency of the winner at the middle and the largest sizes."""
    winner = judgement.winner
    if winner is None or session.on_drift_alone:
        return judgement
    cells = time_sizes(session, [winner.candidate], session.further_sizes)
    figures = point_figures(winner.candidate, cells, session.policy, 1)
    timed = replace(winner, points=(*winner.points, *figures))
    slower = slower_than_eager(timed.points)
    text = f"slower than eager with {slower}" if slower else ""
    return judgement.with_cells(cells).with_winner(timed, text=text)


def explain_rejected(session: Session, judgement: Judgement) -> Judgement:
    """Add to each candidate that drift rejects where it enters; a repaired build that passes the
    gate takes its place.
    """
    return replace(judgement, trials=[_explained(session, trial) for trial in judgement.trials])


def _explained(session: Session, trial: Trial) -> Trial:
    if trial.drift.passed:
        return trial
    explanation = explain_drift(
        session.subject,
        trial.recipe,
        session.target,
        session.reference,
        trial.drift,
        session.gate,
    )
    if explanation is None:
        return trial
    problem = f"{trial.problem}; {explanation.sentence}"
    trial = replace(trial, problem=problem, explanation=explanation)
    guilty, repair = explanation.guilty, explanation.repair
    if session.work is None or not explanation.fails or guilty is None or repair is None:
        return trial
    again = _repaired(session, trial, {guilty.node: repair}, session.work)
    if again.problem is not None:
        return replace(trial, problem=f"{problem}; with this repair: {again.problem}")
    warnings = (*again.candidate.warnings, f"repaired {guilty.node} ({repair}): {problem}")
    candidate = replace(again.candidate, warnings=warnings)
    (candidate.folder / EVIDENCE / "explained.txt").write_text(explanation.text())
    return replace(again, candidate=candidate, explanation=explanation)


def _repaired(session: Session, trial: Trial, repairs: Mapping[str, Repair], work: Path) -> Trial:
    """The trial of another build with repaired nodes."""
    recipe = repaired_recipe(RECIPES[trial.recipe], repairs)
    folder = Path(tempfile.mkdtemp(prefix=f"{trial.recipe}-repaired-", dir=work))
    logger.info("building %s again, repaired: %s", trial.recipe, ", ".join(repairs))
    try:
        candidate = build(session.subject, recipe, session.target, folder)
    except FreezeError as error:
        return replace(trial, problem=first_line(error))
    return run_trial(session, candidate)


Step = Callable[[Session, Judgement], Judgement]

STEPS: tuple[Step, ...] = (
    apply_gate,  # run every candidate, and compare its outputs with the reference (trials.py)
    explain_rejected,  # and judge a repaired build in place of each
    measure_memory,  # of the passing ones in fresh processes, if memory is limited (cold_start.py)
    enter_incumbent,  # let the artifact that serves now compete (incumbent.py)
    time_entrants,  # with eager, side by side, and drop payloads that gain nothing (timed_cells.py)
    measure_quality,
    time_again,  # in a second process, where that can change the verdict (finalists.py)
    decide,  # by the limits and the objective (verdicts.py)
    compare_with_incumbent,  # what is worse does not replace it (incumbent.py)
    time_other_sizes,
    refuse_contradicted,  # by disturbed rounds (verdicts.py)
    serve_unmeasured,  # what passed the drift gate, if the timing was disturbed (verdicts.py)
    measure_winner,  # in a fresh process (cold_start.py)
)

_LONG: Mapping[Step, str] = {
    apply_gate: "comparing outputs with float64",
    explain_rejected: "explaining drift, if any",
    time_entrants: "timing beside eager",
}
"""Steps that are reported, in words."""

TIMING: tuple[Step, ...] = (enter_incumbent, time_entrants, time_other_sizes)
"""Steps that are left out on an emulated CPU."""


def judge(
    session: Session, candidates: Sequence[Candidate], incumbent: Incumbent | None = None
) -> Judgement:
    """Judge the candidates of one model and device class. Nothing else should use the hardware
    meanwhile.

    Args:
        session: the model, the target and the rules.
        candidates: candidates for the target; none if only eager was requested.
        incumbent: the artifact that serves now.

    Raises:
        JudgeError: the candidates were built from other weights, or no fresh process can serve the
            winner.
    """
    for candidate in candidates:
        if candidate.weights != session.subject.weights:
            raise JudgeError(
                f"{session.subject.name}: the source gave other weights when {candidate.recipe} was"
                " built; seed it, or load the weights from a file",
                code="CP-WEIGHTS-DIFFER",
            )
    session = sharing_budget(session, candidates)
    trials = [Trial(candidate=candidate) for candidate in candidates]
    judgement = Judgement(trials=trials, incumbent=incumbent)
    names = ", ".join(candidate.recipe for candidate in candidates)
    with working_conditions(session.target):
        for step in STEPS:
            if not session.timed and step in TIMING:
                continue
            if step in _LONG and candidates:
                logger.info("%s: %s", _LONG[step], names)
            judgement = step(session, judgement)
            take("")
    return judgement


def quality_of(task_metric: TaskMetric, model: Callable[..., Any]) -> float | None:
    """Apply a task metric; return a plain number, or None for NaN and infinities.

    Raises:
        JudgeError: the result is not a number.
    """
    result = task_metric(model)
    try:
        number = float(result)  # may be a tensor or a NumPy scalar
    except Exception as error:
        raise JudgeError(
            f"task_metric: got {type(result).__name__} ({error}), expected one number"
        ) from error
    return finite(number)
