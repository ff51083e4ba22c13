"""The payloads that an artifact holds besides those that won. READ THIS FIRST.

- Further thread counts: only the winner is built, validated and timed for the counts that did not
  decide, so a fleet pays for them once per model and class. A failure here leaves the verdict and
  the payloads for the deciding count as they are; the reason is recorded with the dropped payloads.
- Slow sizes: see slow_sizes.py.
- Torch alone: the second artifact of a class whose winner needs an engine. It serves deployments
  that lack the engine. It has passed the drift gate and was timed in the same rounds as the winner.
  Of its payloads that for all sizes is kept, since each contains the weights: it is timed at the
  points where another one was, and its cold start is measured.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from freezer.artifact import (
    ENGINES,
    Dropped,
    is_specialized,
    payloads_for_threads,
    slower_than_eager,
)
from freezer.errors import FreezeError, JudgeError
from freezer.freezing.candidates import Candidate, build_further
from freezer.freezing.drift import DriftRow, report
from freezer.freezing.judging import (
    Judgement,
    Session,
    Trial,
    kept_payloads,
    over_footprint,
    point_figures,
    ranked,
    refuse_contradicted,
    run_trial,
    time_further_threads,
    time_sizes,
    with_cold_start,
    with_figures,
)
from freezer.freezing.payload_sets.slow_sizes import with_captured
from freezer.freezing.target import working_conditions

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
    logger.info("building %s for %s threads", winner.recipe, target.further_threads)
    try:
        candidate = build_further(session.subject, winner.candidate, target, folder)
    except FreezeError as error:
        failed = [
            Dropped(
                payload="not built",
                num_threads=count,
                reason=str(error),
            )
            for count in target.further_threads
        ]
        return judgement.with_winner(winner.without_payloads(failed))
    return judge_further(session, judgement, candidate)


def judge_further(session: Session, judgement: Judgement, candidate: Candidate) -> Judgement:
    """Judge the winner's payloads for the further thread counts of the target; the verdict stays.

    Args:
        session: the session of the judgement.
        judgement: a judgement with a winner.
        candidate: the winner's candidate, with payloads for the further counts.
    """
    winner = judgement.winner
    assert winner is not None, "only a winner gets payloads for further counts"
    with working_conditions(session.target):
        rows, dropped = _passing_gate(session, candidate)
        candidate = candidate.without(dropped)
        counts = session.target.further_threads
        built = [count for count in counts if payloads_for_threads(candidate.payloads, count)]
        cells = time_further_threads(session, candidate, built) if session.timed else ()
    slow: tuple[Dropped, ...] = ()
    if session.timed:
        candidate, slow = kept_payloads(session, candidate, (*judgement.cells, *cells))
    large = _too_large(session, candidate)
    candidate = candidate.without(large)
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


def _passing_gate(session: Session, candidate: Candidate) -> tuple[list[DriftRow], list[Dropped]]:
    """The drift at the counts at which the candidate passes the drift gate, and the payloads to
    drop for the others.
    """
    rows: list[DriftRow] = []
    dropped = []
    for count in session.target.further_threads:
        payloads = tuple(payload for payload in candidate.payloads if payload.num_threads == count)
        if not payloads:  # payloads for any count were judged with this one before
            continue
        trial = run_trial(session, replace(candidate, payloads=payloads))
        if trial.problem is None:
            rows += trial.drift.rows
        else:
            dropped += _dropped(candidate, count, trial.problem)
    return rows, dropped


def _too_large(session: Session, candidate: Candidate) -> list[Dropped]:
    """The payloads of the last counts, so that the rest is within `size_mb_max`."""
    most_mb = session.limits.size_mb_max
    dropped: list[Dropped] = []
    for count in reversed(session.target.further_threads):
        size_mb = candidate.without(dropped).size_bytes / 1e6
        if most_mb is not None and size_mb > most_mb:
            reason = f"{size_mb:.1f} MB with it; size_mb_max is {most_mb:g}"
            dropped += _dropped(candidate, count, reason)
    return dropped


def _dropped(candidate: Candidate, count: int, reason: str) -> list[Dropped]:
    """The payloads of a candidate for a thread count, dropped for a reason."""
    return [
        Dropped(
            payload=payload.path,
            num_threads=count,
            reason=reason,
        )
        for payload in candidate.payloads
        if payload.num_threads == count
    ]


def with_torch_only(session: Session, judgement: Judgement, _: Path) -> Judgement:
    """Add the best candidate that needs torch alone to a winner that needs an engine.

    Args:
        session: the session of the judgement.
        judgement: the judgement; unchanged if the winner needs torch alone, or nothing that does
            passed the drift gate without ties, and meets the limits on size and memory.
    """
    winner = judgement.winner
    if winner is None or not _needs_engine(winner):
        return judgement
    # At ties, two candidates may give different answers; both artifacts serve one class.
    alone = [
        trial
        for trial in judgement.passing
        if not _needs_engine(trial)
        and not (trial.ties or winner.ties)
        and over_footprint(session.limits, trial) is None
    ]
    if not alone:
        return judgement
    sampling = judgement.sampling
    best = ranked(session, alone, sampling)[0] if sampling else alone[0]
    second = replace(judgement, winner=best, best=best, previous=None, inherited=None)
    try:
        second = _for_all_sizes(session, second, best)
        assert second.winner is not None
        if session.timed or not judgement.inherited:
            second = second.with_winner(with_cold_start(session, second.winner))
    except JudgeError as error:
        return judgement.with_winner(winner, text=f"no artifact that needs torch alone: {error}")
    engine = ENGINES[winner.candidate.payloads[0].kind]
    text = f"{best.recipe} serves where {engine} is not installed"
    return replace(judgement.with_winner(winner, text=text), torch_only=second)


def _for_all_sizes(session: Session, judgement: Judgement, best: Trial) -> Judgement:
    """The judgement with the winner's payload for all sizes alone, and with its speed; unchanged if
    that cannot be measured, since the machine is disturbed or a call takes too long.
    """
    payloads = payloads_for_threads(best.candidate.payloads, session.num_threads)
    dropped = [
        Dropped(
            payload=payload.path,
            num_threads=session.num_threads,
            reason="of what needs torch alone, only the payload for all sizes is kept",
        )
        for payload in payloads
        if is_specialized(payload, payloads)
    ]
    if not dropped:
        return judgement
    candidate = best.candidate.without(dropped)
    trial = replace(best, candidate=candidate).without_payloads(dropped)
    second = replace(judgement, trials=(trial,))
    if session.timed:
        with working_conditions(session.target):
            cells = time_sizes(session, [candidate], session.subject.points)
        second = with_figures(session, second, cells)
        (trial,) = second.trials
        if trial.speedup is None:
            return judgement
    return replace(second, winner=trial, best=trial)


def _needs_engine(trial: Trial) -> bool:
    return trial.candidate.lowering in ENGINES


STEPS: tuple[Callable[[Session, Judgement, Path], Judgement], ...] = (
    with_further_threads,  # for the thread counts that did not decide
    lambda session, judgement, _: refuse_contradicted(session, judgement),  # by their figures
    with_captured,  # for sizes where the winner is slower than eager
    with_torch_only,  # for use without the winner's engine
)


def with_other_payloads(session: Session, judgement: Judgement, folder: Path) -> Judgement:
    """Add the payloads that serve where the deciding one does not.

    Args:
        session: the session of the judgement.
        judgement: the judgement; without a winner, or a measured speed, it is returned unchanged.
        folder: an existing folder for payloads; it must exist until the artifact is written.
    """
    if judgement.verdict == "unstable":
        return judgement
    for step in STEPS:
        judgement = step(session, judgement, Path(tempfile.mkdtemp(dir=folder)))
    return judgement
