"""Further thread counts: build, validate and time the winner of a judgement for the thread counts
that did not decide it.

Only the winner is built for them, so a fleet pays for them once per model and class. A failure here
leaves the verdict and the payloads for the deciding count as they are; the reason is recorded with
the dropped payloads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from freezer.artifact import Dropped, payloads_for_threads, slower_than_eager
from freezer.errors import FreezeError
from freezer.freezing.candidates import Candidate, build_further
from freezer.freezing.drift import Gate, report
from freezer.freezing.judging import Judgement, figures_of, kept, run_trial, time_further_threads
from freezer.freezing.models import Subject, to_device
from freezer.freezing.target import Target
from freezer.runtime.devices import current
from freezer.runtime.torch_settings import plain_precision, threads

logger = logging.getLogger("coldpress")


def with_further_threads(
    subject: Subject, judgement: Judgement, target: Target, folder: Path
) -> Judgement:
    """Build and judge the winner for the further thread counts of the target. Payloads that fail or
    gain nothing are dropped.

    Args:
        subject, judgement, target: see `judge`; without a winner or further counts, the judgement
            is returned unchanged.
        folder: an existing empty folder for the payloads; it must exist until the artifact is
            written.
    """
    winner = judgement.winner
    if winner is None or not target.further_threads:
        return judgement
    counts = ", ".join(map(str, target.further_threads))
    logger.info(
        "building %s for %s, threads %s", winner.candidate.recipe, target.device_class.name, counts
    )
    try:
        candidate = build_further(subject, winner.candidate, target, folder)
    except FreezeError as error:
        failed = [
            Dropped(payload="not built", num_threads=count, reason=str(error))
            for count in target.further_threads
        ]
        return judgement.with_winner(replace(winner, dropped=(*winner.dropped, *failed)))
    return judge_further(subject, judgement, candidate, target)


def judge_further(
    subject: Subject, judgement: Judgement, candidate: Candidate, target: Target
) -> Judgement:
    """Judge the winner's payloads for the further thread counts of the target; the verdict stays.

    Args:
        subject, judgement, target: see `judge`; the judgement has a winner.
        candidate: the winner's, with payloads for the further counts.
    """
    winner, limits, policy = judgement.winner, judgement.limits, judgement.policy
    assert winner is not None, "only a winner gets payloads for further counts"
    assert winner.drift is not None, "a winner has passed the drift gate"
    subject = to_device(subject, target.device)
    gate = Gate(error_ratio_max=limits.error_ratio_max, float64=judgement.reference.float64)
    rows, dropped = list(winner.drift.rows), list[Dropped]()
    with threads(target.num_threads), plain_precision(target.device), current(target.device):
        for count in target.further_threads:
            own = tuple(payload for payload in candidate.payloads if payload.num_threads == count)
            if own:  # payloads for any count were judged with this one before
                trial = run_trial(
                    subject, replace(candidate, payloads=own), target, judgement.reference, gate
                )
                if trial.problem is None and trial.drift is not None:
                    rows += trial.drift.rows
                else:
                    candidate, gone = _without(candidate, count, trial.problem or "not compared")
                    dropped += gone
        counts = [
            count
            for count in target.further_threads
            if payloads_for_threads(candidate.payloads, count)
        ]
        timed = time_further_threads(subject, candidate, counts, policy)
    candidate, slow = kept(candidate, (*judgement.cells, *timed), limits, policy)
    dropped += slow
    for count in reversed(target.further_threads):
        size_mb = candidate.size_bytes / 1e6
        if limits.size_mb_max is not None and size_mb > limits.size_mb_max:
            candidate, gone = _without(
                candidate, count, f"{size_mb:.1f} MB with it; size_mb_max is {limits.size_mb_max:g}"
            )
            dropped += gone
    points = tuple(figures_of(candidate, timed, policy, 1))
    trial = replace(
        winner,
        candidate=candidate,
        drift=report(rows, gate),
        points=(*winner.points, *points),
        dropped=(*winner.dropped, *dropped),
    )
    slower = slower_than_eager(points)
    judgement = judgement.with_winner(
        trial, text=f"slower than eager with {slower}" if slower else ""
    )
    return replace(judgement, cells=(*judgement.cells, *timed))


def _without(candidate: Candidate, count: int, reason: str) -> tuple[Candidate, Sequence[Dropped]]:
    """The candidate without its payloads for a thread count, and these."""
    gone = [payload.path for payload in candidate.payloads if payload.num_threads == count]
    return candidate.without(gone), [
        Dropped(payload=path, num_threads=count, reason=reason) for path in gone
    ]
