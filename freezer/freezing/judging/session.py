"""Judge: validate and time all candidates of one model and device class side by side with eager,
and decide the verdict.

    reference   outputs of eager, in float64 where the model runs in it   reference.py
    trials      run every candidate, and apply the drift gate             trials.py
    cells       time eager, the passing candidates and the incumbent      timed_cells.py
    verdict     apply the limits and the objective                        verdicts.py
    previous    compare what would be published with the incumbent        incumbent.py

docs/contract.md has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from freezer.artifact import PreviousRecord, Tradeoff, slower_than_eager
from freezer.compare import finite
from freezer.errors import JudgeError
from freezer.freezing.candidates import Candidate
from freezer.freezing.drift import Gate, Reference, run_reference
from freezer.freezing.judging.footprints import with_footprints
from freezer.freezing.judging.incumbent import Incumbent, Rival, enter, settle
from freezer.freezing.judging.timed_cells import (
    Cell,
    figures_of,
    kept,
    time_cells,
    time_sizes,
    without_grad,
)
from freezer.freezing.judging.trials import Trial, run_trial
from freezer.freezing.judging.verdicts import Verdict, conversion, decide, pareto, rivals
from freezer.freezing.models import Subject, to_device, weights_digest
from freezer.freezing.recipes import EAGER
from freezer.freezing.target import Target
from freezer.hardware import PORTABLE
from freezer.runtime.devices import called_on, current
from freezer.runtime.torch_settings import plain_precision, threads
from freezer.spec import Limits, Objective, SamplingPolicy, timing_of
from freezer.timing import Sampling, policy_for


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
        torch_only: if the winner needs an engine, the judgement whose winner is the best trial that
            needs torch alone (torch_only.py).
        pareto: the Pareto front of the trials that passed the drift gate and were timed.
        previous: the artifact that serves now, compared with what would replace it; None without
            one.
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
    torch_only: Judgement | None = None
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
    """Judge the candidates of one model and device class. Nothing else should use the hardware
    meanwhile.

    Args:
        subject: the model.
        candidates: at least one.
        target: the target they were built for. Its first thread count decides; payloads for any
            count must pass the drift gate with every count. For the others see further_threads.py.
        limits: the limits to meet.
        policy: how to sample latency; its time limit covers all points.
        objective: what the winner is best in, of the candidates that meet the limits; `p50` for
            what is judged by drift alone.
        task_metric: the caller's own quality measure; reported, not gated.
        on_drift_alone: report speed without requiring a minimum, as always for the class
            `portable`.
        incumbent: the artifact that serves now; what is worse does not replace it (incumbent.py).

    Raises:
        JudgeError: the eager model does not run, or the candidates were built from other weights.
    """
    _check_weights(subject, candidates)
    on_drift_alone = on_drift_alone or target.device_class.name == PORTABLE
    objective = "p50" if on_drift_alone else objective
    case = _Case(
        subject=to_device(subject, target.device),
        target=target,
        limits=limits,
        policy=policy_for(objective, policy),
        objective=objective,
        on_drift_alone=on_drift_alone,
    )
    with threads(target.num_threads), plain_precision(target.device), current(target.device):
        reference = run_reference(case.subject)
        trials = _apply_gate(case, candidates, reference)
        if not on_drift_alone:
            trials = with_footprints(trials, case.subject, target, limits)
        rival = _enter_incumbent(case, incumbent, trials, reference)
        cells = _time(case, trials, rival)
        trials = _with_latency(case, trials, cells)
        trials, eager_metric = _with_task_metric(case, trials, task_metric)
        verdict, reason, best, previous = _decide(case, trials, cells, rival)
        judgement = Judgement(
            verdict=verdict,
            reason=reason,
            limits=limits,
            policy=case.policy,
            objective=objective,
            pareto=pareto(trials, cells),
            previous=previous,
            winner=best if verdict == "published" else None,
            best=best,
            trials=tuple(trials),
            reference=reference,
            task_metric=eager_metric,
            cells=cells,
        )
        if judgement.winner is not None:
            judgement = _time_other_sizes(case, judgement, judgement.winner)
    return judgement


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A model on the device of its target, and the rules of its judgement; see `judge`."""

    subject: Subject
    target: Target
    limits: Limits
    policy: SamplingPolicy
    objective: Objective
    on_drift_alone: bool


def _check_weights(subject: Subject, candidates: Sequence[Candidate]) -> None:
    """Refuse candidates that were built from other weights than the subject's."""
    weights = weights_digest(subject.model)
    for candidate in candidates:
        if candidate.weights != weights:
            raise JudgeError(
                f"{subject.name}: the source gave other weights when {candidate.recipe} was built;"
                " seed it, or load the weights from a file",
                code="CP-WEIGHTS-DIFFER",
            )


def _apply_gate(case: _Case, candidates: Sequence[Candidate], reference: Reference) -> list[Trial]:
    """Measure the drift of each candidate and apply the gate."""
    gate = Gate(error_ratio_max=case.limits.error_ratio_max, float64=reference.float64)
    return [
        run_trial(case.subject, candidate, case.target, reference, gate) for candidate in candidates
    ]


def _enter_incumbent(
    case: _Case, incumbent: Incumbent | None, trials: Sequence[Trial], reference: Reference
) -> Rival | None:
    """Prepare the incumbent to be timed beside the candidates; None if there is none, or nothing to
    compare it with.
    """
    if incumbent is None or not _passing(trials):
        return None
    candidates = [trial.candidate for trial in trials]
    return enter(incumbent, case.subject, candidates, case.target, reference, case.limits)


def _time(case: _Case, trials: Sequence[Trial], rival: Rival | None) -> tuple[Cell, ...]:
    """Time eager, the passing candidates and the incumbent side by side."""
    able = rivals(trials, case.limits, case.objective)
    entrant = rival.entrant if rival else None
    passing = [trial.candidate for trial in _passing(trials)]
    return time_cells(case.subject, passing, case.target.num_threads, case.policy, able, entrant)


def _with_latency(case: _Case, trials: list[Trial], cells: tuple[Cell, ...]) -> list[Trial]:
    """Add latency and speedup to the passing trials, and drop their payloads that gain nothing."""
    num_candidates = len(_passing(trials))
    return [
        trial if trial.problem is not None else _timed(case, trial, cells, num_candidates)
        for trial in trials
    ]


def _timed(case: _Case, trial: Trial, cells: tuple[Cell, ...], num_candidates: int) -> Trial:
    name, deciding = trial.candidate.recipe, cells[0]
    candidate, dropped = kept(trial.candidate, cells, case.limits, case.policy)
    return replace(
        trial,
        candidate=candidate,
        latency_ms=deciding.sampling.percentiles(name, case.policy),
        speedup=deciding.faster(
            name, EAGER, num_candidates, case.policy, timing_of(case.objective)
        ),
        points=tuple(figures_of(candidate, cells, case.policy, num_candidates)),
        dropped=dropped,
    )


def _with_task_metric(
    case: _Case, trials: list[Trial], task_metric: TaskMetric | None
) -> tuple[list[Trial], float | None]:
    """Apply the caller's own quality measure to the passing trials and to eager."""
    if task_metric is None:
        return trials, None

    def quality(model: Callable[..., Any]) -> float | None:
        return _quality(task_metric, called_on(model, case.subject.device))

    of_eager = quality(partial(without_grad, case.subject.fresh()))
    measured = [
        (
            trial
            if trial.problem is not None
            else replace(trial, task_metric=quality(trial.candidate.open(case.subject)))
        )
        for trial in trials
    ]
    return measured, of_eager


def _decide(
    case: _Case, trials: Sequence[Trial], cells: Sequence[Cell], rival: Rival | None
) -> tuple[Verdict, str, Trial, PreviousRecord | None]:
    """Apply the limits and the objective, then compare what would be published with the
    incumbent.
    """
    verdict, reason, best = decide(
        trials, cells, case.limits, case.objective, on_drift_alone=case.on_drift_alone
    )
    reason += conversion(trials, cells, case.policy)
    if rival is None:
        return verdict, reason, best, None
    verdict, reason, previous = settle(
        rival, (verdict, reason, best), cells[0], case.limits, case.policy, case.objective
    )
    return verdict, reason, best, previous


def _time_other_sizes(case: _Case, judgement: Judgement, winner: Trial) -> Judgement:
    """Add the latency of the winner at the middle and the largest sizes."""
    sizes = time_sizes(case.subject, [winner.candidate], case.target.num_threads, case.policy)
    timed = replace(
        winner, points=(*winner.points, *figures_of(winner.candidate, sizes, case.policy, 1))
    )
    slower = slower_than_eager(timed.points)
    text = f"slower than eager with {slower}" if slower and not case.on_drift_alone else ""
    return replace(judgement, cells=(*judgement.cells, *sizes)).with_winner(timed, text=text)


def _passing(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.problem is None]


def _quality(task_metric: TaskMetric, model: Callable[..., Any]) -> float | None:
    """Apply a task metric; return a plain number, or None for NaN and infinities.

    Raises:
        JudgeError: the result is not a number.
    """
    found = task_metric(model)
    try:
        number = float(found)  # may be a tensor or a NumPy scalar
    except Exception as error:
        raise JudgeError(
            f"task_metric: got {type(found).__name__} ({error}), expected one number"
        ) from error
    return finite(number)
