"""Judge: validate and time all candidates of one model and device class side by side with eager, and decide the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from freezer.artifact.sections import Migration, PreviousRecord, Tradeoff, slower_than_eager
from freezer.errors import JudgeError
from freezer.freezing.candidates.candidate import Candidate
from freezer.freezing.models.subject import Subject, placed
from freezer.freezing.models.weights import weights_digest
from freezer.freezing.recipes.recipes import EAGER
from freezer.freezing.target.target import Target
from freezer.freezing.validation.drift import Gate
from freezer.freezing.validation.footprints import with_footprints
from freezer.freezing.validation.incumbent import Incumbent, enter, settle
from freezer.freezing.validation.migration import compare
from freezer.freezing.validation.reference import Reference, run_reference
from freezer.freezing.validation.timed_cells import Cell, figures_of, kept, time_cells, time_sizes, without_grad
from freezer.freezing.validation.trials import Trial, run_trial
from freezer.freezing.validation.verdicts import Verdict, decide, pareto, rivals
from freezer.hardware.device_classes import PORTABLE
from freezer.limits import Limits, Objective, SamplingPolicy, Timing, timing_of
from freezer.runtime.devices import called_on, current
from freezer.runtime.precision import plain_precision
from freezer.runtime.threads import threads
from freezer.timing.sampling import Sampling, policy_for


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict of one model and device class, with its evidence.

    Attributes:
        reason: one sentence for people.
        limits, policy, objective: see `judge`.
        winner: the trial to publish; None unless published.
        best: the trial that came nearest; its figures are shown if nothing is published.
        task_metric: the eager model's.
        cells: all timed cells, the deciding one first; none if no candidate passed the drift gate.
        migration: for a TorchScript model that was converted.
        fallback: the best trial that needs torch alone, if the winner does not (fallback.py).
        pareto: the Pareto front of the trials that passed the drift gate and were timed.
        previous: the artifact that serves now, compared with what would replace it; None without one.
    """

    verdict: Verdict
    reason: str
    limits: Limits
    policy: SamplingPolicy
    winner: Trial | None
    best: Trial | None
    trials: tuple[Trial, ...]
    reference: Reference
    task_metric: float | None
    cells: tuple[Cell, ...]
    migration: Migration | None
    fallback: Trial | None = None
    objective: Objective = "p50"
    pareto: tuple[Tradeoff, ...] = ()
    previous: PreviousRecord | None = None

    @property
    def sampling(self) -> Sampling | None:
        """The samples of the deciding cell."""
        return self.cells[0].sampling if self.cells else None

    @property
    def eager_latency_ms(self) -> Mapping[str, float | None] | None:
        """Percentiles of eager in the deciding cell."""
        return self.sampling.percentiles(EAGER, self.policy) if self.sampling else None

    def with_winner(self, trial: Trial, *, text: str = "") -> Judgement:
        """The judgement with another trial of its winner, and more text in its reason."""
        trials = tuple(trial if one is self.winner else one for one in self.trials)
        reason = "; ".join(part for part in (self.reason, text) if part)
        return replace(self, winner=trial, best=trial, trials=trials, reason=reason)


TaskMetric = Callable[[Callable[..., Any]], float]
"""Measure the quality of a callable model; larger is better."""


def judge(
    subject: Subject,
    candidates: Sequence[Candidate],
    target: Target,
    *,
    limits: Limits,
    policy: SamplingPolicy,
    objective: Objective = "p50",
    task_metric: TaskMetric | None = None,
    on_drift_alone: bool = False,
    incumbent: Incumbent | None = None,
) -> Judgement:
    """Judge the candidates of one model and device class. Nothing else should use the hardware meanwhile.

    Args:
        subject: the model.
        candidates: at least one.
        target: the target they were built for. Its first thread count decides; payloads for any count must pass the drift gate
            with every count. For the others see further_threads.py.
        limits: the limits to meet.
        policy: how to sample latency; its time limit covers all points.
        objective: what the winner is best in, of the candidates that meet the limits; `p50` for what is judged by drift alone.
        task_metric: the caller's own quality measure; reported, not gated.
        on_drift_alone: report speed without requiring a minimum, as always for the class `portable`.
        incumbent: the artifact that serves now; what is worse does not replace it (incumbent.py).

    Raises:
        JudgeError: the eager model does not run, or the candidates were built from other weights.
    """
    _check_weights(subject, candidates)
    subject = placed(subject, target.device)
    by_drift = on_drift_alone or target.device_class.name == PORTABLE
    objective = "p50" if by_drift else objective
    policy = policy_for(objective, policy)
    with threads(target.num_threads), plain_precision(target.device), current(target.device):
        reference = run_reference(subject)
        gate = Gate(error_ratio_max=limits.error_ratio_max, float64=reference.float64)
        trials: list[Trial] = []
        outputs: dict[str, list[list[Tensor]]] = {}  # of all calls, to compare the candidates of a TorchScript model
        for candidate in candidates:
            trial, found = run_trial(subject, candidate, target, reference, gate)
            trials.append(trial)
            if subject.scripted:
                outputs[candidate.recipe] = found
        if not by_drift:
            trials = with_footprints(trials, subject, target, limits, objective)
        passing = [trial.candidate for trial in trials if trial.problem is None]
        old = enter(incumbent, subject, candidates, target, reference, limits, objective) if incumbent and passing else None
        entrant = old.entrant if old else None
        cells = time_cells(subject, passing, target.num_threads, policy, rivals(trials, limits, objective), entrant)
        eager_metric = None
        if task_metric is not None:
            eager_metric = _quality(task_metric, called_on(partial(without_grad, subject.fresh()), subject.device))
        if cells:
            timing = timing_of(objective)
            trials = [_measured(trial, cells, len(passing), limits, policy, timing) for trial in trials]
        if task_metric is not None:
            trials = [_with_quality(trial, subject, task_metric) for trial in trials]
        verdict, reason, best = decide(trials, cells, limits, objective, on_drift_alone=by_drift)
        front, previous = pareto(trials, cells), None
        if old is not None:
            verdict, reason, previous = settle(old, (verdict, reason, best), cells[0], limits, policy, objective)
        if verdict == "published":
            sizes = time_sizes(subject, [best.candidate], target.num_threads, policy)
            timed = replace(best, points=(*best.points, *figures_of(best.candidate, sizes, policy, 1)))
            trials, cells, best = [timed if trial is best else trial for trial in trials], (*cells, *sizes), timed
            slower = slower_than_eager(best.points)
            reason += f"; slower than eager with {slower}" if slower and not by_drift else ""
    return Judgement(
        verdict=verdict,
        reason=reason,
        limits=limits,
        policy=policy,
        objective=objective,
        pareto=front,
        previous=previous,
        winner=best if verdict == "published" else None,
        best=best,
        trials=tuple(trials),
        reference=reference,
        task_metric=eager_metric,
        cells=cells,
        migration=compare(trials, outputs, cells[0].sampling if cells else None, policy) if subject.scripted else None,
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


def _measured(
    trial: Trial, cells: Sequence[Cell], num_candidates: int, limits: Limits, policy: SamplingPolicy, timing: Timing
) -> Trial:
    """Add latency and speedup to a passing trial, and drop payloads that gain nothing."""
    if trial.problem is not None:
        return trial
    name = trial.candidate.recipe
    candidate, dropped = kept(trial.candidate, cells, limits, policy)
    return replace(
        trial,
        candidate=candidate,
        latency_ms=cells[0].sampling.percentiles(name, policy),
        speedup=cells[0].faster(name, EAGER, num_candidates, policy, timing),
        points=tuple(figures_of(candidate, cells, policy, num_candidates)),
        dropped=dropped,
    )


def _with_quality(trial: Trial, subject: Subject, task_metric: TaskMetric) -> Trial:
    """Add the task metric to a passing trial."""
    if trial.problem is not None:
        return trial
    return replace(trial, task_metric=_quality(task_metric, called_on(trial.candidate.open(subject), subject.device)))


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
