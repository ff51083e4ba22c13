"""Judge: validate and time all candidates of one model and device class side by side with eager, and decide the verdict."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from freezer.artifact.sections import Dropped, Migration, PointFigures
from freezer.errors import JudgeError
from freezer.freezing.candidates.candidate import Candidate
from freezer.freezing.diagnostics.messages import run_sentence
from freezer.freezing.models.calls import baked_in
from freezer.freezing.models.subject import Subject, placed
from freezer.freezing.models.weights import weights_digest
from freezer.freezing.recipes.recipes import EAGER
from freezer.freezing.target.target import Target
from freezer.freezing.validation.candidate_runs import Results, assess_runs, runner
from freezer.freezing.validation.candidate_timing import without_grad
from freezer.freezing.validation.drift import DriftReport, Gate
from freezer.freezing.validation.migration import Entrant, compare
from freezer.freezing.validation.reference import Reference, run_reference
from freezer.freezing.validation.timed_cells import Cell, figures_of, kept, time_cells
from freezer.hardware.device_classes import PORTABLE
from freezer.limits import Limits, SamplingPolicy
from freezer.runtime.devices import called_on, current
from freezer.runtime.precision import plain_precision
from freezer.runtime.tensors import kept_of
from freezer.runtime.threads import threads
from freezer.timing.sampling import Sampling, Speedup, speedup

Verdict = Literal["published", "kept-eager", "rejected", "failed", "unstable"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Result of one candidate. Figures are None if they were not measured.

    Attributes:
        candidate: the candidate with its kept payloads.
        problem: why it failed the drift gate; None if it passed.
        answers: outputs of the single calls of a passing candidate, without those too large for an artifact.
        latency_ms, speedup: in the deciding cell.
        points: figures of every kept payload in every cell.
        dropped: payloads that were not kept.
    """

    candidate: Candidate
    drift: DriftReport | None
    problem: str | None
    answers: Sequence[Mapping[str, Tensor]] = ()
    latency_ms: Mapping[str, float | None] | None = None
    speedup: Speedup | None = None
    task_metric: float | None = None
    points: tuple[PointFigures, ...] = ()
    dropped: tuple[Dropped, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict of one model and device class, with its evidence.

    Attributes:
        reason: one sentence for people.
        limits, policy: see `judge`.
        winner: the trial to publish; None unless published.
        best: the trial that came nearest; its figures are shown if nothing is published.
        sampling, point: of the deciding cell, the first thread count and point.
        eager_latency_ms: percentiles of eager in that cell.
        task_metric: the eager model's.
        cells: all timed cells, the deciding one first.
        migration: for a TorchScript model that was converted.
    """

    verdict: Verdict
    reason: str
    limits: Limits
    policy: SamplingPolicy
    winner: Trial | None
    best: Trial | None
    trials: tuple[Trial, ...]
    reference: Reference
    sampling: Sampling | None
    eager_latency_ms: Mapping[str, float | None] | None
    task_metric: float | None
    judge_s: float
    point: Mapping[str, int] = field(default_factory=dict)
    migration: Migration | None = None
    cells: tuple[Cell, ...] = ()


TaskMetric = Callable[[Callable[..., Any]], float]
"""Measure the quality of a callable model; larger is better."""


def judge(
    subject: Subject,
    candidates: Sequence[Candidate],
    target: Target,
    *,
    limits: Limits,
    policy: SamplingPolicy,
    task_metric: TaskMetric | None = None,
    on_drift_alone: bool = False,
) -> Judgement:
    """Judge the candidates of one model and device class. Nothing else should use the hardware meanwhile.

    Args:
        subject: the model.
        candidates: at least one.
        target: the target they were built for.
        limits: the limits to meet.
        policy: how to sample latency; its time limit covers all thread counts and points.
        task_metric: the caller's own quality measure; reported, not gated.
        on_drift_alone: report speed without requiring a minimum, as always for the class `portable`.

    Raises:
        JudgeError: the eager model does not run, or the candidates were built from other weights.
    """
    started = time.monotonic()
    _check_weights(subject, candidates)
    subject = placed(subject, target.device)
    with threads(target.num_threads), plain_precision(target.device), current(target.device):
        reference = run_reference(subject)
        gate = Gate(error_ratio_max=limits.error_ratio_max)
        trials, answers = _try_all(subject, candidates, target, reference, gate)
        passing = [trial.candidate for trial in trials if trial.problem is None]
        cells = time_cells(subject, passing, target, policy)
        sampling = cells[0].sampling if cells else None
        eager_metric = None
        if task_metric is not None:
            eager_metric = _quality(task_metric, called_on(partial(without_grad, subject.fresh()), subject.device))
        trials = [_measured(t, subject, cells, len(passing), limits, policy, task_metric) for t in trials]
    eager_ms = sampling.percentiles(EAGER, policy) if sampling else None
    on_drift_alone = on_drift_alone or target.device_class.name == PORTABLE
    verdict, reason, winner, best = _decide(trials, sampling, limits, on_drift_alone=on_drift_alone)
    return Judgement(
        verdict=verdict,
        reason=reason,
        limits=limits,
        policy=policy,
        winner=winner,
        best=best,
        trials=tuple(trials),
        reference=reference,
        sampling=sampling,
        eager_latency_ms=eager_ms,
        task_metric=eager_metric,
        judge_s=time.monotonic() - started,
        point=subject.points[0],
        migration=compare(_entrants(trials, answers), sampling, policy) if answers else None,
        cells=cells,
    )


def _check_weights(subject: Subject, candidates: Sequence[Candidate]) -> None:
    weights = weights_digest(subject.model)
    for candidate in candidates:
        if candidate.weights != weights:
            raise JudgeError(
                f"{subject.name}: the source gave other weights when {candidate.recipe} was built; seed it, or load the weights "
                "from a file",
                code="CP-WEIGHTS-DIFFER",
            )


def _try_all(
    subject: Subject, candidates: Sequence[Candidate], target: Target, reference: Reference, gate: Gate
) -> tuple[list[Trial], dict[str, list[list[Tensor]]]]:
    """Run every candidate over all calls and apply the gate; for a TorchScript model also return the candidates' outputs."""
    answers: dict[str, list[list[Tensor]]] = {}
    trials = []
    for candidate in candidates:
        try:
            drift, results = assess_runs(subject, candidate, target, reference, gate)
        except Exception as error:  # a payload may raise anything; the others go on
            trials.append(Trial(candidate=candidate, drift=None, problem=run_sentence(error)))
            continue
        problem = _constant(subject, reference, results, candidate) if drift.passed else drift.nearest_miss
        own = () if problem else _singles(subject, results)
        trials.append(Trial(candidate=candidate, drift=drift, problem=problem, answers=own))
        if subject.scripted:
            answers[candidate.recipe] = [leaves for _, _, leaves in results]
    return trials, answers


def _singles(subject: Subject, results: Sequence[tuple[str, int, list[Tensor]]]) -> tuple[Mapping[str, Tensor], ...]:
    """Outputs of the single calls by name, in the order of the input sets."""
    names = [output.name for output in subject.outputs]
    return tuple(kept_of(names, leaves) for kind, _, leaves in results if kind == "single")


def _entrants(trials: Sequence[Trial], answers: Mapping[str, list[list[Tensor]]]) -> list[Entrant]:
    return [
        Entrant(
            recipe=trial.candidate.recipe,
            capture=trial.candidate.capture,
            lowering=trial.candidate.lowering,
            passed=trial.problem is None,
            answers=answers[trial.candidate.recipe],
        )
        for trial in trials
        if trial.candidate.recipe in answers
    ]


def _constant(subject: Subject, reference: Reference, results: Results, candidate: Candidate) -> str | None:
    """Detect a candidate with constants in place of a model's random numbers; return the problem or None."""
    if reference.deterministic:
        return None
    again = [(call.eager, leaves) for call, (_, index, leaves) in zip(reference.calls, results, strict=True) if index == 0]
    ask = partial(runner(candidate.open(subject), subject).call, subject.sets[0].tensors)
    return baked_in([eager for eager, _ in again], [leaves for _, leaves in again], ask)


def _measured(
    trial: Trial,
    subject: Subject,
    cells: Sequence[Cell],
    num_candidates: int,
    limits: Limits,
    policy: SamplingPolicy,
    task_metric: TaskMetric | None,
) -> Trial:
    """Add latency, speedup and task metric to a passing trial, and drop payloads that gain nothing."""
    if trial.problem is not None or not cells:
        return trial
    sampling, name = cells[0].sampling, trial.candidate.recipe
    candidate, dropped = kept(trial.candidate, cells, limits, policy)
    return replace(
        trial,
        candidate=candidate,
        latency_ms=sampling.percentiles(name, policy),
        speedup=speedup(sampling, name, eager=EAGER, num_candidates=num_candidates, policy=policy) if sampling.stable else None,
        task_metric=None if task_metric is None else _quality(task_metric, called_on(candidate.open(subject), subject.device)),
        points=tuple(figures_of(candidate, cells, policy, num_candidates)),
        dropped=dropped,
    )


def _quality(task_metric: TaskMetric, model: Callable[..., Any]) -> float | None:
    """Apply a task metric; return a plain number, or None for NaN and infinities.

    Raises:
        JudgeError: the result is not a number.
    """
    found = task_metric(model)
    try:
        number = float(found)  # may be a tensor or a NumPy scalar
    except Exception as error:
        raise JudgeError(f"task_metric: got {type(found).__name__} ({error}), expected one number") from error
    return number if math.isfinite(number) else None


def _decide(
    trials: Sequence[Trial], sampling: Sampling | None, limits: Limits, *, on_drift_alone: bool
) -> tuple[Verdict, str, Trial | None, Trial | None]:
    """The verdict (docs/contract.md), its reason, the winner, and the best trial."""
    passing = [trial for trial in trials if trial.problem is None]
    if not passing:
        nearest = min(trials, key=lambda t: t.drift.error_ratio if t.drift and t.drift.error_ratio is not None else float("inf"))
        return "rejected", f"{nearest.candidate.recipe}: {nearest.problem}", None, nearest
    if on_drift_alone:
        return "published", f"{passing[0].candidate.capture} program, judged on drift alone", passing[0], passing[0]
    if sampling is None or not sampling.stable:
        kept, dropped = (len(sampling.samples_ms[EAGER]), sampling.num_dropped) if sampling else (0, 0)
        reason = f"only {kept} undisturbed rounds within the time limit ({dropped} dropped); too few to measure speed"
        if sampling and sampling.device and (shared := sampling.device.get("num_rounds_shared")):
            reason += f"; in {shared} of them another process used the GPU"
        return "unstable", reason, None, passing[0]
    ranked = sorted(passing, key=lambda t: -(t.speedup.value if t.speedup else 0.0))
    fastest = ranked[0]
    found = [(trial, _over_limit(trial, limits)) for trial in ranked]
    winner = next((trial for trial, over in found if over is None), None)
    if winner is not None and winner.speedup is not None:
        reason = (
            f"{winner.candidate.recipe} is {winner.speedup.value:.2f} times as fast as eager (at least {winner.speedup.low:.2f})"
        )
        return "published", reason, winner, winner
    return "kept-eager", f"{fastest.candidate.recipe}: {found[0][1]}", None, fastest


def _over_limit(trial: Trial, limits: Limits) -> str | None:
    """The limit on speed or size that a trial exceeds; None if it meets all."""
    median = (trial.latency_ms or {}).get("p50")
    size_mb = sum(payload.size_bytes for payload in trial.candidate.payloads) / 1e6
    if trial.speedup is None or trial.speedup.low <= limits.speedup_min:
        got = f"{trial.speedup.value:.2f}, at least {trial.speedup.low:.2f}" if trial.speedup else "unknown"
        return f"speedup {got}; speedup_min is {limits.speedup_min:g}"
    if limits.latency_ms_max is not None and (median is None or median > limits.latency_ms_max):
        return f"median {median} ms; latency_ms_max is {limits.latency_ms_max:g}"
    if limits.size_mb_max is not None and size_mb > limits.size_mb_max:
        return f"{size_mb:.1f} MB; size_mb_max is {limits.size_mb_max:g}"
    return None
