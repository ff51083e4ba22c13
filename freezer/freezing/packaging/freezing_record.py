"""The manifest's record of a freeze: reports of the winner, and results of every other recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from freezer.artifact.freezing_report import FreezingReport
from freezer.artifact.sections import CandidateRecord, EntrantRecord, FreezingRecord

if TYPE_CHECKING:
    from freezer.freezing.validation.judge import Judgement, Trial


def freezing_record(judgement: Judgement, winner: Trial, failures: Mapping[str, str]) -> FreezingRecord:
    """The section `freezing` of the manifest.

    Args:
        judgement: the judgement of the device class.
        winner: the trial whose artifact it is.
        failures: the error message of each recipe that made no candidate.
    """
    from freezer.freezing.validation.migration import refused  # imports torch; drivers use the functions below without it

    candidate = winner.candidate
    return FreezingRecord(
        build_s=candidate.build_s,
        size_bytes=size_bytes(winner),
        warnings=candidate.warnings,
        entrants=tuple(_entrant(trial) for trial in judgement.trials),
        reports=_reports(winner),
        dropped=winner.dropped,
        strides_equal=strides_equal(winner),
        candidates=tuple(_other(trial) for trial in judgement.trials if trial is not winner),
        failures=failures,
        migration=judgement.migration or refused(failures),
    )


def size_bytes(trial: Trial) -> int:
    """Size of all payloads of a candidate."""
    return sum(payload.size_bytes for payload in trial.candidate.payloads)


def strides_equal(trial: Trial) -> bool | None:
    """Whether every output had eager's strides in every judged call; None if that was not compared.

    The drift gate requires equal strides in all dims of more than one element.
    """
    if trial.drift is None or not trial.drift.rows:
        return None
    problems = [row.problem or "" for row in trial.drift.rows]
    if any(problem.startswith("strides ") for problem in problems):
        return False
    return None if any(problem.startswith(("shape ", "dtype ")) or "outputs, eager" in problem for problem in problems) else True


def _entrant(trial: Trial) -> EntrantRecord:
    return EntrantRecord(
        recipe=trial.candidate.recipe,
        problem=trial.problem,
        speedup=trial.speedup.value if trial.speedup else None,
        error_ratio=trial.drift.error_ratio if trial.drift else None,
    )


def _other(trial: Trial) -> CandidateRecord:
    candidate, figures = trial.candidate, _entrant(trial)
    return CandidateRecord(
        recipe=figures.recipe,
        problem=figures.problem,
        speedup=figures.speedup,
        error_ratio=figures.error_ratio,
        capture=candidate.capture,
        lowering=candidate.lowering,
        tried=tuple(tried_json(candidate.tried)),
        build_s=candidate.build_s,
        size_bytes=size_bytes(trial),
        strides_equal=strides_equal(trial),
        reports=_reports(trial),
    )


def tried_json(tried: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The attempts without their error files, which stay with the candidate."""
    return [{key: text for key, text in row.items() if key != "error"} for row in tried]


def _reports(trial: Trial) -> dict[str, FreezingReport]:
    return {path: report.shortened() for path, report in trial.candidate.reports.items()}
