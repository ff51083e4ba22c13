"""Run a candidate over all calls, as it would serve with each thread count, and apply the drift gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from freezer.artifact.manifest import Payload, serving, set_for, without_special
from freezer.freezing.candidates.candidate import Candidate
from freezer.freezing.models.subject import Subject
from freezer.freezing.target.target import Target
from freezer.freezing.validation.drift import CallKind, DriftReport, Gate, assess, joined
from freezer.freezing.validation.reference import Reference, Runner, run_calls
from freezer.runtime.frozen_model import FrozenModel
from freezer.runtime.pytree import leaves_of
from freezer.runtime.threads import threads

Results = Sequence[tuple[CallKind, int, list[Tensor]]]
"""For each call its kind, the index of its input set, and the output tensors."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way a candidate may serve: a thread count, and the payloads to choose from by shape."""

    num_threads: int
    payloads: tuple[Payload, ...]


def runs_of(subject: Subject, candidate: Candidate, target: Target) -> list[Run]:
    """All ways a candidate may serve, the deciding one first.

    Where payloads for single points may still be dropped, serving those points without them is a way of its own.
    """
    found: list[Run] = []
    for count in target.thread_counts:
        held = set_for(candidate.payloads, count)
        found.append(Run(num_threads=count, payloads=held))
        may_go = len(subject.points) > 1 or count != target.num_threads
        if may_go and without_special(held) != held:
            found.append(Run(num_threads=count, payloads=without_special(held)))
    return found


def assess_runs(
    subject: Subject, candidate: Candidate, target: Target, reference: Reference, gate: Gate
) -> tuple[DriftReport, Results]:
    """The drift of a candidate over all its runs, and the outputs of the first. Errors of a payload propagate."""
    reports: list[DriftReport] = []
    first: Results = ()
    for run in runs_of(subject, candidate, target):
        with threads(run.num_threads):
            fresh = partial(_opened, subject, candidate, run)
            results = run_calls(fresh, subject, stateful=reference.stateful)
        reports.append(_drift(subject, candidate, run, reference, results, gate))
        first = first or results
    return joined(reports, gate), first


def _opened(subject: Subject, candidate: Candidate, run: Run) -> Runner:
    return runner(candidate.open(subject, run.payloads), subject)


def runner(model: FrozenModel, subject: Subject) -> Runner:
    """An instance of a candidate to compare."""

    def call(tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return [leaf.cpu() for leaf in leaves_of(model(**{name: tensor.clone() for name, tensor in tensors.items()}))]

    return Runner(call=call, reset=None if subject.reset is None else model.preserved[subject.reset])


def _drift(subject: Subject, candidate: Candidate, run: Run, reference: Reference, results: Results, gate: Gate) -> DriftReport:
    calls = [replace(call, candidate=leaves) for call, (_, _, leaves) in zip(reference.calls, results, strict=True)]
    names = [output.name for output in subject.outputs]
    found = assess(candidate.recipe, names, calls, gate, float64=reference.float64)
    served = [serving(run.payloads, item.point) for item in subject.sets]
    paths = [payload.path if payload else "" for payload in served]
    noted = [replace(row, num_threads=run.num_threads, payload=paths[row.set_index]) for row in found.rows]
    return replace(found, rows=tuple(noted))
