"""What serves although the timing was disturbed, or the CPU is emulated.

Drift belongs to the weights and was judged. Speed belongs to the architecture, device class, thread
count and recipe: what an earlier judge measured of them with other weights holds here, too.
"""

from __future__ import annotations

from dataclasses import replace

from freezer.artifact import LatencyRecord, Manifest, MeasuredLatency
from freezer.freezing.candidates import architecture_digest
from freezer.freezing.judging.judgement import Judgement, Trial
from freezer.freezing.judging.session import Session
from freezer.freezing.judging.verdicts import over_footprint
from freezer.freezing.recipes import EAGER
from freezer.timing import Speedup


def serve_unmeasured(session: Session, judgement: Judgement) -> Judgement:
    """After the verdict `unstable`, or without timing, choose a trial that passed the drift gate to
    serve until the timing is repeated: of the recipe of the artifact that serves now, if that has
    the same architecture and a measured speed; or else, if the session says so, the one with the
    best estimate.
    """
    unmeasured = judgement.winner is not None and not session.timed
    if judgement.verdict != "unstable" and not unmeasured:
        return judgement
    within = [each for each in judgement.passing if over_footprint(session.limits, each) is None]
    if judgement.incumbent is not None:
        manifest = judgement.incumbent.manifest
        speed = _earlier_speed(session, manifest)
        for trial in within:
            if speed is not None and trial.recipe == manifest.recipe.name:
                return _inheriting(judgement, trial, speed)
    if session.serves_unmeasured and within and session.timed:
        return _with_best_estimate(session, judgement, within)
    return judgement


def _earlier_speed(session: Session, manifest: Manifest) -> LatencyRecord | None:
    """The speed that an artifact was published for, if it holds for the model of a session."""
    speed = manifest.latency
    if speed is None or speed.speedup_ci is None or speed.clock == "disturbed":
        return None
    place = (session.num_threads, session.subject.points[0])
    is_enough = session.on_drift_alone or speed.speedup_ci[0] > session.limits.speedup_min
    if not is_enough or (speed.num_threads, speed.point) != place:
        return None
    architecture = architecture_digest(session.subject, session.target)
    if manifest.provenance.get("architecture") != architecture:
        return None
    return replace(speed, inherited=speed.inherited or manifest.version)


def _inheriting(judgement: Judgement, trial: Trial, speed: LatencyRecord) -> Judgement:
    assert speed.speedup is not None, "the speed was measured"
    low, high = speed.speedup_ci or (speed.speedup, speed.speedup)
    faster = Speedup(value=speed.speedup, low=low, high=high, clock="inherited")
    timed = replace(
        trial,
        speedup=faster,
        latency_ms=MeasuredLatency(**{name: speed.ms.get(name) for name in ("p50", "p90", "p99")}),
    )
    text = (
        f"{trial.recipe} serves: it passed the drift gate, and was {faster} times as fast as eager"
        f" in version {speed.inherited} of the same architecture"
    )
    judgement = replace(judgement, winner=trial, inherited=speed, eager_ms=speed.eager_ms)
    return judgement.with_winner(timed, text=text)


def _with_best_estimate(session: Session, judgement: Judgement, trials: list[Trial]) -> Judgement:
    """The judgement with the fastest trial by all rounds as its winner, if that is fast enough."""
    sampling = judgement.sampling
    assert sampling is not None, "passing trials were timed"
    estimates_ms = sampling.estimates_ms
    best = min(trials, key=lambda trial: estimates_ms[trial.recipe])
    estimate = estimates_ms[EAGER] / estimates_ms[best.recipe]
    if estimate <= session.limits.speedup_min:
        return judgement
    text = f"{best.recipe} serves: it passed the drift gate; speed not measured"
    return replace(judgement, winner=best).with_winner(best, text=text)
