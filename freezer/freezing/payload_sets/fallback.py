"""The fallback of a winner that needs an engine besides torch: the best candidate that needs torch
alone.

It serves deployments that lack the engine. It has passed the drift gate and was timed in the same
rounds as the winner; nothing is measured again, but payloads for further thread counts are built
and judged as for a winner.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from freezer.artifact import ENGINES, Dropped
from freezer.files import link_or_copy
from freezer.freezing.candidates import EVIDENCE, Candidate
from freezer.freezing.judging import Judgement, Trial
from freezer.freezing.models import Subject
from freezer.freezing.payload_sets.further_threads import with_further_threads
from freezer.freezing.target import Target

PREFIX = "torch-"
"""Begins the names of the fallback's payloads and texts, so that none is named like the winner's.
"""


def needs_engine(trial: Trial | None) -> bool:
    """Whether a trial's payloads need an engine besides torch; False for None."""
    return trial is not None and trial.candidate.lowering in ENGINES


def with_fallback(
    subject: Subject, judgement: Judgement, target: Target, folder: Path
) -> Judgement:
    """Add the best candidate that needs torch alone to a winner that needs an engine.

    Args:
        subject, judgement, target: see `judge`. If the winner needs torch alone, or nothing that
            does passed the drift gate without ties, the judgement is returned unchanged.
        folder: an existing empty folder for payloads; it must exist until the artifact is written.
    """
    winner, limit = judgement.winner, judgement.limits.size_mb_max
    if winner is None or not needs_engine(winner):
        return judgement
    # At ties, the golden outputs are the winner's own: a canary would reject others.
    alone = [
        one
        for one in judgement.trials
        if one.problem is None and not needs_engine(one) and not (one.ties or winner.ties)
    ]
    if not alone:
        return judgement
    sampling = judgement.sampling
    to_the_end = [
        one for one in alone if sampling is None or not sampling.stopped(one.candidate.recipe)
    ]
    best = max(to_the_end or alone, key=lambda trial: trial.speedup.value if trial.speedup else 0.0)
    for name in ("further", "fallback"):
        (folder / name).mkdir()
    served = with_further_threads(
        subject, replace(judgement, winner=best), target, folder / "further"
    )
    assert served.winner is not None
    candidate = _renamed(served.winner.candidate, folder / "fallback")
    size_mb = (winner.candidate.size_bytes + candidate.size_bytes) / 1e6
    if limit is not None and size_mb > limit:
        reason = f"{size_mb:.1f} MB with it; size_mb_max is {limit:g}"
        dropped = [
            Dropped(payload=item.path, num_threads=item.num_threads or 0, reason=reason)
            for item in candidate.payloads
        ]
        return judgement.with_winner(replace(winner, dropped=(*winner.dropped, *dropped)))
    paths = {
        item.path: f"payloads/{PREFIX}{Path(item.path).name}"
        for item in served.winner.candidate.payloads
    }
    points = tuple(
        replace(item, payload=paths[item.payload])
        for item in served.winner.points
        if item.payload in paths
    )
    fallback = replace(served.winner, candidate=candidate, points=points)
    text = (
        f"{best.candidate.recipe} serves where {ENGINES[winner.candidate.payloads[0].kind]} is not"
        " installed"
    )
    return replace(judgement.with_winner(winner, text=text), fallback=fallback, cells=served.cells)


def _renamed(candidate: Candidate, folder: Path) -> Candidate:
    """The candidate in another folder, with the prefix before the names of its payloads and
    texts.
    """
    payloads = tuple(
        replace(item, path=f"payloads/{PREFIX}{Path(item.path).name}")
        for item in candidate.payloads
    )
    for own, item in zip(candidate.payloads, payloads, strict=True):
        link_or_copy(candidate.folder / own.path, folder / item.path)
    for text in (candidate.folder / EVIDENCE).glob("*"):
        link_or_copy(text, folder / EVIDENCE / f"{PREFIX}{text.name}")
    reports = {
        f"payloads/{PREFIX}{Path(path).name}": report for path, report in candidate.reports.items()
    }
    return replace(candidate, folder=folder, payloads=payloads, reports=reports)
