"""Verdicts: which candidate wins. The drift gate and the limits decide who may, the objective which
of them does.

docs/reference/contract.md describes both.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace

from freezer.artifact import LatencyRecord, Manifest, Tradeoff, num_items
from freezer.freezing.candidates import architecture_digest
from freezer.freezing.judging.judgement import Cell, Judgement, Trial, Verdict, again, recorded
from freezer.freezing.judging.session import Session
from freezer.freezing.recipes import EAGER, RECIPES, is_exact
from freezer.hardware import this_host
from freezer.spec import CLOCKS, MARKS, Limits, timing_of
from freezer.timing import Sampling, Speedup

ALIKE = 1.05
"""Sizes within this ratio of the least count as equal: the fastest of these candidates wins."""

MOST_APART = 4.0
"""How many times as large as at another point a speedup by disturbed rounds may be; with more
threads, also as many times as there are more threads.
"""

_BY = {"p50": "", "p95": " by p95", "throughput": " in throughput"}


def decide(session: Session, judgement: Judgement) -> Judgement:
    """Decide the verdict (docs/reference/contract.md), its reason, and the trial that won or came
    nearest.
    """
    verdict, reason, best = _decided(session, judgement)
    for trial in judgement.trials:
        if trial.problem and trial is not best and not is_exact(trial.recipe):
            reason += f"; {trial.recipe}: {trial.problem}"
    return replace(
        judgement,
        verdict=verdict,
        reason=reason + judgement.reason,
        best=best,
        winner=best if verdict == "published" else None,
        pareto=pareto(judgement),
    )


def _decided(session: Session, judgement: Judgement) -> tuple[Verdict, str, Trial | None]:
    passing = judgement.passing
    if not judgement.trials:
        return "kept-eager", "no recipe other than eager was requested", None
    if not passing:
        nearest = min(judgement.trials, key=_distance)
        return "rejected", f"{nearest.recipe}: {nearest.problem}", nearest
    if session.on_drift_alone:
        best = passing[0]
        return "published", f"{best.candidate.capture} program, judged on drift alone", best
    if not session.timed:
        return _untimed(session, passing)
    sampling = judgement.cells[0].sampling
    if not sampling.stable:
        return "unstable", sampling.problem, passing[0]
    passing = [each for each in passing if _in_both(sampling, each)] or passing
    able = [trial for trial in passing if over_limit(session, trial) is None]
    best = ranked(session, able or passing, sampling)[0]
    clock = ""
    if sampling.clock != "wall":
        clock = f"; {CLOCKS[sampling.clock]}, since {sampling.disturbance}"
    if able:
        return "published", _praise(session, best) + clock, best
    reason = f"{best.recipe}: {over_limit(session, best)}{clock}"
    if sampling.clock == "disturbed":  # noise may hide a speedup: the artifact that serves stays
        return "unstable", reason, best
    return "kept-eager", reason, best


def _untimed(session: Session, passing: Sequence[Trial]) -> tuple[Verdict, str, Trial]:
    """The verdict without timing: the last recipe of `auto` in the order of builds wins, which
    freezes most. Of the limits, only size is checked.
    """
    order = list(RECIPES)

    def rank(trial: Trial) -> tuple[bool, bool, bool, int]:
        is_small = over_footprint(session.limits, trial) is None
        recipe = RECIPES[trial.recipe]
        return is_small, is_exact(recipe.name), recipe.auto, order.index(recipe.name)

    best = max(passing, key=rank)
    if problem := over_footprint(session.limits, best):
        return "kept-eager", f"{best.recipe}: {problem}", best
    reason = f"{best.recipe} passes the drift gate; speed not measured"
    if this_host().emulated:
        reason += ", since the CPU is emulated"
    return "published", reason, best


def refuse_contradicted(session: Session, judgement: Judgement) -> Judgement:
    """Refuse a winner by disturbed rounds whose other timings contradict its speedup.

    Under load, threads of torch wait for each other far longer than those of engines do.
    """
    winner, sampling = judgement.winner, judgement.sampling
    if winner is None or sampling is None or sampling.clock != "disturbed":
        return judgement
    deciding, *others = winner.points
    for other in others:
        most = max(MOST_APART, deciding.num_threads / other.num_threads)
        if (deciding.speedup or 0) > most * (other.speedup or math.inf):
            contrary = f"{MARKS[other.clock]}{other.speedup:.2f}"
            reason = (
                f"{winner.recipe}: ~{deciding.speedup:.2f} times as fast as eager with"
                f" {deciding.place}, contradicted by {contrary} with {other.place};"
                f" {sampling.problem}"
            )
            return replace(
                judgement,
                verdict="unstable",
                reason=reason,
                winner=None,
            )
    return judgement


def _distance(trial: Trial) -> float:
    error_ratio = trial.measured.drift.error_ratio
    return math.inf if error_ratio is None else error_ratio


def could_win(session: Session, trials: Sequence[Trial]) -> list[str]:
    """The recipes that could win by their median, so that what is clearly slower need not be timed
    to the end.
    """
    if session.objective != "p50":
        return []
    return [trial.recipe for trial in trials if over_footprint(session.limits, trial) is None]


def ranked(session: Session, trials: Sequence[Trial], sampling: Sampling) -> list[Trial]:
    """The trials, the fastest first; for the objective `size`, those of about the least size."""
    if session.objective == "size":
        most = ALIKE * min(trial.candidate.size_bytes for trial in trials)
        trials = [trial for trial in trials if trial.candidate.size_bytes <= most]

    def rank(trial: Trial) -> tuple[bool, float]:
        to_the_end = _in_both(sampling, trial) or not sampling.stopped(trial.recipe)
        return to_the_end, _speedup(trial).value

    return sorted(trials, key=rank, reverse=True)


def _in_both(sampling: Sampling, trial: Trial) -> bool:
    """Whether a trial was timed in two processes."""
    return again(trial.recipe) in sampling.samples_ms


def _speedup(trial: Trial) -> Speedup:
    assert trial.speedup is not None, "the trial was timed"
    return trial.speedup


def _praise(session: Session, trial: Trial) -> str:
    """Why a trial won."""
    faster, by = _speedup(trial), _BY[timing_of(session.objective)]
    speed = f"{faster} times as fast as eager{by} ({faster.least})"
    if trial.accuracy is not None:
        speed += f"; {trial.accuracy}"
    if session.objective != "size":
        return f"{trial.recipe} is {speed}"
    size_mb = trial.candidate.size_bytes / 1e6
    return f"{trial.recipe}: {size_mb:.1f} MB, the least of those within the limits; {speed}"


def over_limit(session: Session, trial: Trial) -> str | None:
    """The limit on speed, size or memory that a timed trial exceeds; None if it meets all."""
    limits, faster = session.limits, _speedup(trial)
    if faster.low <= limits.speedup_min:
        figure = _BY[timing_of(session.objective)]
        return f"speedup{figure} {faster}, {faster.least}; speedup_min is {limits.speedup_min:g}"
    name, latency_ms = "median", trial.latency_ms.p50
    if session.objective == "p95":
        name, latency_ms = "p95", trial.latency_ms.p95
    most_ms = limits.latency_ms_max
    if most_ms is not None and (latency_ms is None or latency_ms > most_ms):
        return f"{name} {MARKS[faster.clock]}{latency_ms} ms; latency_ms_max is {most_ms:g}"
    return over_footprint(limits, trial)


def over_footprint(limits: Limits, trial: Trial) -> str | None:
    """The limit on size or memory that a trial exceeds; None if it meets both."""
    size_mb = trial.candidate.size_bytes / 1e6
    memory_mb = trial.cold_start.memory_mb if trial.cold_start else math.inf
    if limits.size_mb_max is not None and size_mb > limits.size_mb_max:
        return f"{size_mb:.1f} MB; size_mb_max is {limits.size_mb_max:g}"
    if limits.memory_mb_max is not None and memory_mb > limits.memory_mb_max:
        return f"{memory_mb:.1f} MB of memory; memory_mb_max is {limits.memory_mb_max:g}"
    return None


def pareto(judgement: Judgement) -> tuple[Tradeoff, ...]:
    """The Pareto front of the trials that passed the drift gate, the fastest first; empty if the
    machine was too disturbed.

    It is about the speedup in the objective's figure, the size, and, where they were measured, load
    time and memory. Limits do not matter.
    """
    costs = [(_costs(trial), trial) for trial in judgement.passing if trial.speedup]
    front = []
    for cost, trial in sorted(costs, key=operator.itemgetter(0)):
        better = [other for other, _ in costs if all(map(operator.le, other, cost))]
        if set(better) == {cost}:
            front.append(_tradeoff(trial, judgement.cells[0]))
    return tuple(front)


def _costs(trial: Trial) -> tuple[float, ...]:
    """Figures of which less is better."""
    cold = trial.cold_start
    footprint = (cold.load_ms, cold.memory_mb) if cold else ()
    return (-_speedup(trial).value, trial.candidate.size_bytes, *footprint)


def _tradeoff(trial: Trial, cell: Cell) -> Tradeoff:
    cold = trial.cold_start
    return Tradeoff(
        recipe=trial.recipe,
        p50_ms=trial.latency_ms.p50,
        p95_ms=trial.latency_ms.p95,
        items_per_s=num_items(cell.point) * 1e3 / cell.sampling.mean_ms(trial.recipe),
        load_ms=cold.load_ms if cold else None,
        memory_mb=cold.memory_mb if cold else None,
        size_mb=trial.candidate.size_bytes / 1e6,
    )


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
    timed = replace(trial, speedup=faster, latency_ms=recorded(speed.ms))
    text = (
        f"{trial.recipe} serves: it passed the drift gate, and was {faster} times as fast as eager"
        f" in version {speed.inherited} of the same architecture"
    )
    judgement = replace(judgement, winner=trial, inherited=speed, eager_ms=speed.eager_ms)
    return judgement.with_winner(timed, text=text)


def _with_best_estimate(session: Session, judgement: Judgement, trials: list[Trial]) -> Judgement:
    """The judgement with the fastest trial by all rounds as its winner, if that is fast enough."""
    estimates_ms = judgement.cells[0].sampling.estimates_ms
    best = min(trials, key=lambda trial: estimates_ms[trial.recipe])
    estimate = estimates_ms[EAGER] / estimates_ms[best.recipe]
    if estimate <= session.limits.speedup_min:
        return judgement
    text = f"{best.recipe} serves: it passed the drift gate; speed not measured"
    return replace(judgement, winner=best).with_winner(best, text=text)
