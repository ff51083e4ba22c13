"""Explain the candidates that drift rejects, and let a repaired build of each compete instead."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import replace
from pathlib import Path

from freezer.artifact import Explanation
from freezer.errors import FreezeError, first_line
from freezer.freezing.candidates import EVIDENCE, build, repaired_recipe
from freezer.freezing.explaining import explain_drift
from freezer.freezing.judging.judgement import Judgement, Trial
from freezer.freezing.judging.session import Session
from freezer.freezing.judging.trials import run_trial
from freezer.freezing.recipes import RECIPES

logger = logging.getLogger("coldpress")


def explain_rejected(session: Session, judgement: Judgement) -> Judgement:
    """Add to each candidate that drift rejects where it enters; a repaired build that passes the
    gate takes its place.
    """
    trials = [_explained(session, trial) for trial in judgement.trials]
    return replace(judgement, trials=tuple(trials))


def _explained(session: Session, trial: Trial) -> Trial:
    if trial.drift is None or trial.drift.passed:
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
    return _repaired(session, trial, explanation) or trial


def _repaired(session: Session, trial: Trial, explanation: Explanation) -> Trial | None:
    """The trial of a build with the guilty node repaired; None if it does not pass either."""
    guilty, repair = explanation.guilty, explanation.repair
    if session.work is None or not explanation.fails or guilty is None or repair is None:
        return None
    recipe = repaired_recipe(RECIPES[trial.recipe], {guilty.node: repair})
    folder = Path(tempfile.mkdtemp(prefix=f"{trial.recipe}-repaired-", dir=session.work))
    logger.info("building %s again, %s: %s", trial.recipe, guilty.node, repair)
    try:
        candidate = build(session.subject, recipe, session.target, folder)
    except FreezeError as error:
        logger.info("%s cannot be repaired: %s", trial.recipe, first_line(error))
        return None
    (folder / EVIDENCE / "explained.txt").write_text(explanation.text())
    again = run_trial(session, candidate)
    if again.problem is not None:
        logger.info("%s drifts when repaired, too: %s", trial.recipe, again.problem)
        return None
    kept = {"apart": "not folded", "float64": "computed in float64"}[repair]
    warning = f"{guilty.node} is {kept}, because the drift entered there: {trial.problem}"
    warnings = (*again.candidate.warnings, warning)
    candidate = replace(again.candidate, warnings=warnings)
    return replace(again, candidate=candidate, explanation=explanation)
