"""Runs: a candidate over all calls, as it would serve with each thread count, held to the gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from freezer.artifact.manifest import Payload
from freezer.artifact.payload_selection import serving, set_for, without_special
from freezer.freezing.candidates.candidate import Candidate
from freezer.freezing.models.subject import Subject
from freezer.freezing.target.target import Target
from freezer.freezing.validation.drift import Call, DriftReport, Gate, assess, joined
from freezer.freezing.validation.reference import CallKind, Reference, Runner, run_calls
from freezer.runtime.frozen_model import FrozenModel
from freezer.runtime.pytree import leaves_of
from freezer.runtime.threads import threads

Results = Sequence[tuple[CallKind, int, list[Tensor]]]
"""Of every call its kind, the index of its input set, and the output tensors."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A way in which a candidate may serve: a thread count, and the payloads to choose from by shape."""

    num_threads: int
    payloads: tuple[Payload, ...]


def runs_of(subject: Subject, candidate: Candidate, target: Target) -> list[Run]:
    """All ways in which a candidate may serve, the deciding one first.

    Where payloads for single points may yet be left out, what then serves those points is a way of its own.
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
    """The drift of a candidate over all calls in all ways, and what it answered in the first. Raises whatever a payload raises."""
    answers: list[Results] = []
    reports: list[DriftReport] = []
    for run in runs_of(subject, candidate, target):
        answers.append(_results(subject, candidate, run, reference))
        reports.append(_drift(subject, candidate, run, reference, answers[-1], gate))
    return joined(reports, gate), answers[0]


def runner(model: FrozenModel, subject: Subject) -> Runner:
    """One instance of a candidate, as it is compared."""

    def call(tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return [leaf.cpu() for leaf in leaves_of(model(**{name: tensor.clone() for name, tensor in tensors.items()}))]

    return Runner(call=call, reset=None if subject.reset is None else model.preserved[subject.reset])


def _results(subject: Subject, candidate: Candidate, run: Run, reference: Reference) -> Results:
    with threads(run.num_threads):
        return run_calls(lambda: runner(candidate.open(subject, run.payloads), subject), subject, stateful=reference.stateful)


def _drift(subject: Subject, candidate: Candidate, run: Run, reference: Reference, results: Results, gate: Gate) -> DriftReport:
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
    found = assess(candidate.recipe, names, calls, gate, float64=reference.float64)
    served = [serving(run.payloads, item.point) for item in subject.sets]
    paths = [payload.path if payload else "" for payload in served]
    noted = [replace(row, num_threads=run.num_threads, payload=paths[row.set_index]) for row in found.rows]
    return replace(found, rows=tuple(noted))
