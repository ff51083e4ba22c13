"""Judge: validate and time all candidates of one model and device class side by side, with the eager model among them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import Tensor

from freezer.build import Candidate
from freezer.capture_errors import run_sentence
from freezer.chance import baked_in
from freezer.device_class import PORTABLE
from freezer.drift import Call, DriftReport, Gate, assess
from freezer.errors import JudgeError
from freezer.frozen_model import FrozenModel
from freezer.latency import Sampling, Speedup, speedup
from freezer.limits import Limits, SamplingPolicy
from freezer.migration import Entrant, Migration, compare
from freezer.outputs import leaves_of
from freezer.own_outputs import kept_of
from freezer.recipes import EAGER
from freezer.reference import Reference, Runner, run_calls, run_reference
from freezer.sources import weights_digest
from freezer.subject import Subject
from freezer.target import Target, threads
from freezer.timing import time_at, without_grad

Verdict = Literal["published", "kept-eager", "rejected", "failed", "unstable"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What the judge found of one candidate. Figures are None where it did not come to measure them.

    Attributes:
        answers: where it passed, its outputs for each input set, in single calls; without those that no artifact would keep.
    """

    candidate: Candidate
    drift: DriftReport | None
    problem: str | None
    answers: Sequence[Mapping[str, Tensor]] = ()
    latency_ms: Mapping[str, float | None] | None = None
    speedup: Speedup | None = None
    task_metric: float | None = None


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict of one model and device class, with its evidence.

    Attributes:
        reason: one sentence for people.
        winner: the trial to publish; None unless published.
        best: the trial that came nearest, for the figures of a verdict that publishes nothing.
        eager_latency_ms: percentiles at the first point.
        task_metric: of the eager model.
        migration: of a TorchScript model that was converted too.
    """

    verdict: Verdict
    reason: str
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


TaskMetric = Callable[[Callable[..., Any]], float]
"""Given a callable that answers as the model does, its quality; larger is better."""


def judge(
    subject: Subject,
    candidates: Sequence[Candidate],
    target: Target,
    *,
    limits: Limits,
    policy: SamplingPolicy,
    task_metric: TaskMetric | None = None,
) -> Judgement:
    """The verdict on the candidates of one model and device class. Nothing else should use the hardware meanwhile.

    Args:
        subject: the model.
        candidates: at least one.
        target: what they were built for.
        limits: of the entry.
        policy: of the timing.
        task_metric: the entry's own measure of quality; reported, not gated.

    Raises:
        JudgeError: the eager model does not run, or is not what the candidates were made of.
    """
    started = time.monotonic()
    _check_weights(subject, candidates)
    with threads(target.num_threads):
        reference = run_reference(subject)
        gate = Gate(error_ratio_max=limits.error_ratio_max)
        opened, trials, answers = _try_all(subject, candidates, reference, gate)
        passing = [trial for trial in trials if trial.problem is None]
        point = subject.spec.first_point()
        timed = {trial.candidate.recipe: opened[trial.candidate.recipe] for trial in passing}
        sampling = time_at(point, subject, timed, policy) if timed else None
        eager_metric = None if task_metric is None else task_metric(partial(without_grad, subject.fresh()))
        trials = [_measured(t, subject, sampling, len(passing), policy, task_metric) for t in trials]
    eager_ms = sampling.percentiles(EAGER, policy) if sampling else None
    verdict, reason, winner, best = _decide(trials, sampling, target, limits)
    return Judgement(
        verdict=verdict,
        reason=reason,
        winner=winner,
        best=best,
        trials=tuple(trials),
        reference=reference,
        sampling=sampling,
        eager_latency_ms=eager_ms,
        task_metric=eager_metric,
        judge_s=time.monotonic() - started,
        point=point,
        migration=compare(_entrants(trials, answers), sampling, policy) if answers else None,
    )


def _check_weights(subject: Subject, candidates: Sequence[Candidate]) -> None:
    """Candidates are held against the model they were made of, or against nothing."""
    weights = weights_digest(subject.model)
    for candidate in candidates:
        if candidate.weights != weights:
            raise JudgeError(
                f"{subject.name}: the source gave other weights when {candidate.recipe} was built; make it deterministic: seed it, "
                "or load the weights from a file",
                code="CP-WEIGHTS-DIFFER",
            )


def _try_all(
    subject: Subject, candidates: Sequence[Candidate], reference: Reference, gate: Gate
) -> tuple[dict[str, FrozenModel], list[Trial], dict[str, list[list[Tensor]]]]:
    """Run every candidate over all calls, and hold it to the gate; and what candidates of a TorchScript model answered."""
    opened: dict[str, FrozenModel] = {}
    answers: dict[str, list[list[Tensor]]] = {}
    trials = []
    for candidate in candidates:
        try:
            results = run_calls(lambda c=candidate: _runner(c.open(subject), subject), subject, stateful=reference.stateful)  # type: ignore[misc]
            opened[candidate.recipe] = candidate.open(subject)
        except Exception as error:  # whatever a payload raises is its own failure, and the others go on
            trials.append(Trial(candidate=candidate, drift=None, problem=run_sentence(error)))
            continue
        calls = [
            Call(
                kind=call.kind,
                set_index=call.set_index,
                reference=call.reference,
                eager=call.eager,
                candidate=leaves,
                noise_rmse=call.noise_rmse,
            )
            for call, (_, _, leaves) in zip(reference.calls, results, strict=True)
        ]
        names = [output.name for output in subject.outputs]
        drift = assess(candidate.recipe, names, calls, gate, float64=reference.float64)
        problem = _constant(subject, reference, results, opened[candidate.recipe]) if drift.passed else drift.nearest_miss
        own = () if problem else _singles(subject, results)
        trials.append(Trial(candidate=candidate, drift=drift, problem=problem, answers=own))
        if subject.scripted:
            answers[candidate.recipe] = [leaves for _, _, leaves in results]
    return opened, trials, answers


def _singles(subject: Subject, results: Sequence[tuple[str, int, list[Tensor]]]) -> tuple[Mapping[str, Tensor], ...]:
    """What single calls gave, by output name, in the order of the input sets."""
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


def _constant(
    subject: Subject, reference: Reference, results: Sequence[tuple[str, int, list[Tensor]]], opened: FrozenModel
) -> str | None:
    """What is wrong with a candidate that keeps what a random model drew while it was captured; None where that does not show."""
    if reference.deterministic:
        return None
    again = [(call.eager, leaves) for call, (_, index, leaves) in zip(reference.calls, results, strict=True) if index == 0]
    ask = partial(_runner(opened, subject).call, subject.sets[0].tensors)
    return baked_in([eager for eager, _ in again], [leaves for _, leaves in again], ask)


def _runner(model: FrozenModel, subject: Subject) -> Runner:
    def run(tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return leaves_of(model(**{name: tensor.clone() for name, tensor in tensors.items()}))

    return Runner(call=run, reset=None if subject.reset is None else model.preserved[subject.reset])


def _measured(
    trial: Trial,
    subject: Subject,
    sampling: Sampling | None,
    num_candidates: int,
    policy: SamplingPolicy,
    task_metric: TaskMetric | None,
) -> Trial:
    """The trial with its latency, speedup and task metric, where it passed."""
    if trial.problem is not None or sampling is None:
        return trial
    name = trial.candidate.recipe
    return Trial(
        candidate=trial.candidate,
        drift=trial.drift,
        problem=None,
        answers=trial.answers,
        latency_ms=sampling.percentiles(name, policy),
        speedup=speedup(sampling, name, eager=EAGER, num_candidates=num_candidates, policy=policy) if sampling.stable else None,
        task_metric=None if task_metric is None else task_metric(trial.candidate.open(subject)),
    )


def _decide(
    trials: Sequence[Trial], sampling: Sampling | None, target: Target, limits: Limits
) -> tuple[Verdict, str, Trial | None, Trial | None]:
    """The verdict as docs/contract.md says, its reason, the winner, and the trial that came nearest."""
    passing = [trial for trial in trials if trial.problem is None]
    if not passing:
        nearest = min(trials, key=lambda t: t.drift.error_ratio if t.drift and t.drift.error_ratio is not None else float("inf"))
        return "rejected", f"{nearest.candidate.recipe}: {nearest.problem}", None, nearest
    if target.device_class.name == PORTABLE:
        return "published", f"{passing[0].candidate.capture} program, judged on drift alone", passing[0], passing[0]
    if sampling is None or not sampling.stable:
        kept, dropped = (len(sampling.samples_ms[EAGER]), sampling.num_dropped) if sampling else (0, 0)
        reason = f"{kept} undisturbed rounds were had within the time limit, {dropped} were dropped; that tells nothing of speed"
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
    """Which limit on speed or size keeps a trial from being published; None when none does."""
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
