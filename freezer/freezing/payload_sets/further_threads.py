"""Further thread counts: build, validate and time the winner of a judgement for the thread counts
that did not decide it.

Only the winner is built for them, so a fleet pays for them once per model and class. A failure here
leaves the verdict and the payloads for the deciding count as they are; the reason is recorded with
the dropped payloads.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from freezer.artifact import Dropped, payloads_for_threads, slower_than_eager
from freezer.errors import FreezeError
from freezer.freezing.candidates import Candidate, build_further
from freezer.freezing.drift import DriftRow, report
from freezer.freezing.judging import (
    Judgement,
    Session,
    judging_conditions,
    kept_payloads,
    point_figures,
    run_trial,
    time_further_threads,
)

logger = logging.getLogger("coldpress")


def with_further_threads(session: Session, judgement: Judgement, folder: Path) -> Judgement:
    """Build and judge the winner for the further thread counts of the target. Payloads that fail or
    gain nothing are dropped.

    Args:
        session: the session of the judgement.
        judgement: the judgement; without a winner or further counts it is returned unchanged.
        folder: an existing empty folder for the payloads; it must exist until the artifact is
            written.
    """
    winner, target = judgement.winner, session.target
    if winner is None or not target.further_threads:
        return judgement
    logger.info(
        "building %s for %s threads",
        winner.recipe,
        target.further_threads,
    )
    try:
        candidate = build_further(
            session.subject,
            winner.candidate,
            target,
            folder,
        )
    except FreezeError as error:
        failed = [
            Dropped(payload="not built", num_threads=count, reason=str(error))
            for count in target.further_threads
        ]
        return judgement.with_winner(winner.without_payloads(failed))
    return judge_further(
        session,
        judgement,
        candidate,
    )


def judge_further(session: Session, judgement: Judgement, candidate: Candidate) -> Judgement:
    """Judge the winner's payloads for the further thread counts of the target; the verdict stays.

    Args:
        session: the session of the judgement.
        judgement: a judgement with a winner.
        candidate: the winner's candidate, with payloads for the further counts.
    """
    winner, counts = judgement.winner, session.target.further_threads
    assert winner is not None, "only a winner gets payloads for further counts"
    assert winner.drift is not None, "a winner has passed the drift gate"
    with judging_conditions(session.target):
        candidate, rows, dropped = _passing_gate(session, candidate)
        built = [count for count in counts if payloads_for_threads(candidate.payloads, count)]
        cells = time_further_threads(
            session,
            candidate,
            built,
        )
    candidate, slow = kept_payloads(
        session,
        candidate,
        (*judgement.cells, *cells),
    )
    candidate, large = _within_size(session, candidate)
    points = tuple(point_figures(candidate, cells, session.policy, 1))
    trial = replace(
        winner,
        candidate=candidate,
        drift=report([*winner.drift.rows, *rows], session.gate),
        points=(*winner.points, *points),
    )
    trial = trial.without_payloads([*dropped, *slow, *large])
    slower = slower_than_eager(points)
    text = f"slower than eager with {slower}" if slower else ""
    return judgement.with_winner(trial, text=text).with_cells(cells)


def _passing_gate(
    session: Session, candidate: Candidate
) -> tuple[Candidate, list[DriftRow], list[Dropped]]:
    """Drop the payloads for the counts at which the candidate fails the drift gate; return the
    drift at the others too.
    """
    rows: list[DriftRow] = []
    dropped: list[Dropped] = []
    for count in session.target.further_threads:
        payloads = tuple(payload for payload in candidate.payloads if payload.num_threads == count)
        if not payloads:  # payloads for any count were judged with this one before
            continue
        trial = run_trial(session, replace(candidate, payloads=payloads))
        if trial.problem is None and trial.drift is not None:
            rows += trial.drift.rows
        else:
            candidate, gone = _without(
                candidate,
                count,
                trial.problem or "not compared",
            )
            dropped += gone
    return candidate, rows, dropped


def _within_size(session: Session, candidate: Candidate) -> tuple[Candidate, list[Dropped]]:
    """Drop the payloads of the last counts until the rest is within `size_mb_max`."""
    most_mb = session.limits.size_mb_max
    dropped: list[Dropped] = []
    for count in reversed(session.target.further_threads):
        size_mb = candidate.size_bytes / 1e6
        if most_mb is not None and size_mb > most_mb:
            reason = f"{size_mb:.1f} MB with it; size_mb_max is {most_mb:g}"
            candidate, removed = _without(
                candidate,
                count,
                reason,
            )
            dropped += removed
    return candidate, dropped


def _without(candidate: Candidate, count: int, reason: str) -> tuple[Candidate, list[Dropped]]:
    """The candidate without its payloads for a thread count, and these."""
    gone = [payload.path for payload in candidate.payloads if payload.num_threads == count]
    dropped = [Dropped(payload=path, num_threads=count, reason=reason) for path in gone]
    return candidate.without(gone), dropped
