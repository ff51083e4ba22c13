"""The session of a judge: the model, the target and the rules that all steps share. Made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from freezer.codec import frozen
from freezer.freezing.drift import Gate, Reference, run_reference
from freezer.freezing.judging.budgets import Budget
from freezer.freezing.models import Subject, to_device
from freezer.freezing.target import Target, target_here, working_conditions
from freezer.hardware import PORTABLE, this_host
from freezer.spec import Limits, Objective, Point, SamplingPolicy
from freezer.timing import policy_for

TaskMetric = Callable[[Callable[..., Any]], float]
"""Measure the quality of a callable model; larger is better."""


@frozen
class Session:
    """What the steps of a judgement share.

    Attributes:
        subject: the model, on the device of the target.
        target: class that the candidates were built for. Its first thread count decides; payloads
            for any count must pass the drift gate with every count.
        limits: limits that a candidate must meet.
        policy: sampling of latency, with enough calls for the objective; its time limit covers all
            points.
        objective: what the winner is best in, of the candidates that meet the limits.
        on_drift_alone: whether speed is reported without requiring a minimum, as always for the
            class `portable`.
        serves_unmeasured: whether the best estimate serves where the timing was disturbed.
        task_metric: the caller's own quality measure; reported, not gated.
        reference: outputs of eager, in float64 where the model runs in it.
        gate: the drift gate.
        timed: whether speed is measured: not on an emulated CPU.
        work: a folder for builds of repaired candidates, which stays as long as the judgement; None
            to repair none.
        budget: what candidates of a lower precision are judged by; None without consent.
    """

    subject: Subject
    target: Target
    limits: Limits
    policy: SamplingPolicy
    objective: Objective
    on_drift_alone: bool
    task_metric: TaskMetric | None
    reference: Reference
    gate: Gate
    serves_unmeasured: bool = False
    timed: bool = True
    work: Path | None = None
    budget: Budget | None = None

    @property
    def num_threads(self) -> int:
        """The deciding thread count."""
        return self.target.num_threads

    @property
    def further_sizes(self) -> tuple[Point, ...]:
        """The middle and the largest sizes, beside the points."""
        return self.subject.spec.further_sizes(self.subject.points)

    @property
    def output_names(self) -> list[str]:
        """Names of the model's outputs."""
        return [output.name for output in self.subject.outputs]


def open_session(
    subject: Subject,
    target: Target,
    *,
    limits: Limits,
    policy: SamplingPolicy,
    objective: Objective = "p50",
    task_metric: TaskMetric | None = None,
) -> Session:
    """Move a model to the device of a target, and run its reference there.

    Args:
        subject, target, limits, policy, objective, task_metric: see `Session`. What is judged by
            drift alone has the objective `p50`.

    Raises:
        JudgeError: the eager model does not run.
    """
    on_drift_alone = target.device_class.name == PORTABLE
    objective = "p50" if on_drift_alone else objective
    timed = not this_host().emulated
    limits = limits if timed else replace(limits, memory_mb_max=None)
    subject = to_device(subject, target.device)
    with working_conditions(target):
        reference = run_reference(subject)
    held_out = None if on_drift_alone else subject.held_out
    return Session(
        subject=subject,
        target=target,
        limits=limits,
        policy=policy_for(objective, policy),
        objective=objective,
        on_drift_alone=on_drift_alone,
        task_metric=task_metric,
        reference=reference,
        gate=Gate(error_ratio_max=limits.error_ratio_max, float64=reference.float64),
        timed=timed,
        budget=None if held_out is None else Budget(subject=subject, held_out=held_out),
    )


def for_portable(
    session: Session, thread_counts: Sequence[int], limits: Limits, policy: SamplingPolicy
) -> Session:
    """The session of `portable` for the model of a CPU session, with the same reference.

    Args:
        session: the session of a CPU class with the same deciding thread count.
        thread_counts, limits, policy: those of the judge of `portable`.
    """
    return replace(
        session,
        target=target_here(PORTABLE, thread_counts),
        limits=limits,
        policy=policy_for("p50", policy),
        objective="p50",
        on_drift_alone=True,
        budget=None,
    )
