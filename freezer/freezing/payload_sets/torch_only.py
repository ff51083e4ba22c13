"""The second artifact of a class whose winner needs an engine: the best candidate that needs torch
alone.

It serves deployments that lack the engine. It has passed the drift gate and was timed in the same
rounds as the winner; only its cold start is measured, and payloads for further thread counts are
built and judged as for a winner.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from freezer.artifact import ENGINES
from freezer.errors import JudgeError
from freezer.freezing.judging import Judgement, Session, Trial, over_footprint, with_cold_start
from freezer.freezing.payload_sets.further_threads import with_further_threads


def with_torch_only(session: Session, judgement: Judgement, folder: Path) -> Judgement:
    """Add the best candidate that needs torch alone to a winner that needs an engine.

    Args:
        session: the session of the judgement.
        judgement: the judgement; returned unchanged if the winner needs torch alone, or nothing
            that does passed the drift gate without ties, and meets the limits on size and memory.
        folder: an existing empty folder for payloads; it must exist until the artifact is written.
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
    to_the_end = [
        trial for trial in alone if sampling is None or not sampling.stopped(trial.recipe)
    ]
    best = max(to_the_end or alone, key=lambda trial: trial.speedup.value if trial.speedup else 0.0)
    second = replace(
        judgement,
        winner=best,
        best=best,
        previous=None,
    )
    try:
        second = second.with_winner(with_cold_start(session, best))
    except JudgeError as error:
        text = f"no artifact that needs torch alone: {error}"
        return judgement.with_winner(winner, text=text)
    engine = ENGINES[winner.candidate.payloads[0].kind]
    text = f"{best.recipe} serves where {engine} is not installed"
    return replace(
        judgement.with_winner(winner, text=text),
        torch_only=with_further_threads(session, second, folder),
    )


def _needs_engine(trial: Trial) -> bool:
    return trial.candidate.lowering in ENGINES
