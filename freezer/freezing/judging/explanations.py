"""Explain the candidates that drift rejects, and let a repaired build of each compete instead."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from freezer.errors import FreezeError, first_line
from freezer.freezing.candidates import EVIDENCE, build, repaired_recipe
from freezer.freezing.capture import Repair
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
    guilty, repair = explanation.guilty, explanation.repair
    if session.work is None or not explanation.fails or guilty is None or repair is None:
        return trial
    again = _repaired(session, trial, {guilty.node: repair}, session.work)
    if again.problem is not None:
        return replace(trial, problem=f"{problem}; with this repair: {again.problem}")
    warning = f"repaired {guilty.node} ({repair}): {problem}"
    warnings = (*again.candidate.warnings, warning)
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
