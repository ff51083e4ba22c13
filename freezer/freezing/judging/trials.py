"""Trials: run a candidate over all calls, as it would serve with each thread count, and apply the
drift gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from freezer.artifact import (
    ENGINES,
    ColdStart,
    Dropped,
    Payload,
    PointFigures,
    payload_at,
    payloads_for_threads,
    without_specialized,
)
from freezer.freezing.candidates import Candidate
from freezer.freezing.diagnostics import run_sentence
from freezer.freezing.drift import (
    STRIDES,
    Call,
    DriftReport,
    DriftRow,
    Gate,
    Reference,
    Runner,
    assess,
    at_ties,
    distribution_problem,
    eager_reruns,
    report,
    run_calls,
    sampled,
)
from freezer.freezing.models import Subject, baked_in
from freezer.freezing.target import Target, check_unlimited
from freezer.runtime.tensor_files import small_outputs
from freezer.runtime.tensors import leaves_of
from freezer.runtime.torch_settings import threads
from freezer.timing import Speedup


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Result of one candidate. Figures are None if they were not measured.

    Attributes:
        candidate: the candidate with its kept payloads.
        problem: why it failed the drift gate; None if it passed.
        ties: if ties explain differences from eager, the calls of the deciding way with the
            candidate's answers there.
        answers: outputs of the single calls of a passing candidate, without those too large for an
            artifact.
        latency_ms, speedup: in the deciding cell; the speedup is of the objective's figure
            (`timing_of`).
        cold_start: measured if memory is limited.
        points: figures of every kept payload in every cell.
        dropped: payloads that were not kept.
    """

    candidate: Candidate
    drift: DriftReport | None
    problem: str | None
    ties: tuple[Call, ...] = ()
    answers: Sequence[Mapping[str, Tensor]] = ()
    latency_ms: Mapping[str, float | None] | None = None
    speedup: Speedup | None = None
    cold_start: ColdStart | None = None
    task_metric: float | None = None
    points: tuple[PointFigures, ...] = ()
    dropped: tuple[Dropped, ...] = ()

    @property
    def strides_equal(self) -> bool | None:
        """Whether every output had eager's strides in every call, in dims of more than one element;
        None if not compared.
        """
        rows = self.drift.rows if self.drift else ()
        return not any((row.problem or "").startswith(STRIDES) for row in rows) if rows else None


def run_trial(
    subject: Subject, candidate: Candidate, target: Target, reference: Reference, gate: Gate
) -> Trial:
    """Run a candidate in every way it may serve, and apply the gate."""
    names = [output.name for output in subject.outputs]
    rows: list[DriftRow] = []
    answers: list[dict[str, Tensor]] = []
    ties: tuple[Call, ...] = ()
    random: str | None = None

    def run(fresh: Callable[[], Runner], kept: list[list[Tensor]]) -> Iterator[Call]:
        """Make the calls one by one, so that only one call's outputs are in memory unless all are
        needed later.
        """
        deciding = not answers
        for call, leaves in zip(
            reference.calls, run_calls(fresh, subject, stateful=reference.stateful), strict=True
        ):
            if not reference.deterministic:
                kept.append(leaves)
            if deciding and call.kind == "single" and len(leaves) == len(names):
                answers.append(small_outputs(names, leaves))
            yield replace(call, candidate=leaves)

    try:
        if candidate.lowering in ENGINES:  # it may have been built on another machine
            check_unlimited(target, ENGINES[candidate.payloads[0].kind])
        for num_threads, payloads in _ways_to_serve(subject, candidate, target):
            fresh = partial(_runner, subject, candidate, payloads)
            results: list[list[Tensor]] = []
            with threads(num_threads):
                found = assess(candidate.recipe, names, run(fresh, results), gate, reference.scales)
            served = [payload_at(payloads, item.point) for item in subject.sets]
            paths = [payload.path if payload else "" for payload in served]
            if reference.deterministic and any(row.problem for row in found):
                with threads(num_threads):
                    found, settled = _without_ties(subject, found, run(fresh, []), gate, reference)
                ties = settled if settled and not rows else ties
            rows += [
                replace(row, num_threads=num_threads, payload=paths[row.set_index]) for row in found
            ]
            if (
                not reference.deterministic
                and random is None
                and not any(row.problem for row in found)
            ):
                with threads(num_threads):
                    random = _random_problem(subject, reference, fresh, results)
    except Exception as error:  # a payload may raise anything; the others go on
        return Trial(candidate=candidate, drift=None, problem=run_sentence(error))
    drift = report(rows, gate)
    problem = random if drift.passed else drift.nearest_miss
    return Trial(
        candidate=candidate,
        drift=drift,
        problem=problem,
        answers=answers if problem is None else (),
        ties=ties,
    )


def _without_ties(
    subject: Subject, rows: list[DriftRow], again: Iterable[Call], gate: Gate, reference: Reference
) -> tuple[list[DriftRow], tuple[Call, ...]]:
    """Judge a candidate that failed again without its differences at ties.

    Args:
        rows: as it failed.
        again: makes its calls again, with all outputs in memory.

    Returns:
        New rows and calls if it passes so, otherwise the given rows and no calls.
    """
    names = [output.name for output in subject.outputs]
    failed = {names.index(row.output) for row in rows if row.problem}
    if (
        found := at_ties(list(again), failed, eager_reruns(subject, stateful=reference.stateful))
    ) is None:
        return rows, ()
    calls, ties = found
    judged = assess(rows[0].recipe, names, calls, gate, reference.scales)
    if any(row.problem for row in judged):
        return rows, ()
    order = [
        (position, index) for index in range(len(names)) for position in range(len(calls))
    ]  # of `assess`
    counts = [int(ties[place].sum()) if place in ties else 0 for place in order]
    return [replace(row, num_ties=count) for row, count in zip(judged, counts, strict=True)], tuple(
        calls
    )


def _ways_to_serve(
    subject: Subject, candidate: Candidate, target: Target
) -> Iterator[tuple[int, tuple[Payload, ...]]]:
    """Thread count and payloads of all ways a candidate may serve, the deciding one first.

    Where payloads for single points may still be dropped, serving those points without them is a
    way of its own.
    """
    for count in target.thread_counts:
        held = payloads_for_threads(candidate.payloads, count)
        if not held:  # not built for this count
            continue
        yield count, held
        may_go = len(subject.points) > 1 or count != target.num_threads
        if may_go and without_specialized(held) != held:
            yield count, without_specialized(held)


def _runner(
    subject: Subject, candidate: Candidate, payloads: Sequence[Payload] | None = None
) -> Runner:
    """A newly opened instance of a candidate."""
    model = candidate.open(subject, payloads)

    def call(tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return [
            leaf.cpu()
            for leaf in leaves_of(
                model(**{name: tensor.clone() for name, tensor in tensors.items()})
            )
        ]

    return Runner(
        call=call, reset=None if subject.reset is None else model.preserved[subject.reset]
    )


def _random_problem(
    subject: Subject,
    reference: Reference,
    fresh: Callable[[], Runner],
    results: Sequence[list[Tensor]],
) -> str | None:
    """Detect constants in place of a model's random numbers, and other distributions; return the
    problem or None.
    """
    again = [
        (call.eager, leaves)
        for call, leaves in zip(reference.calls, results, strict=True)
        if call.set_index == 0
    ]
    ask = partial(fresh().call, subject.sets[0].tensors)
    if problem := baked_in([eager for eager, _ in again], [leaves for _, leaves in again], ask):
        return problem
    more = [
        sampled(list(run_calls(fresh, subject, stateful=reference.stateful)))
        for _ in reference.runs[1:]
    ]
    return distribution_problem(
        [output.name for output in subject.outputs], reference.runs, [sampled(results), *more]
    )
