"""Trials: run a candidate over all calls, as it would serve with each thread count, and apply the
drift gate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from freezer.artifact import (
    ENGINES,
    AccuracyRecord,
    Payload,
    payload_at,
    payloads_for_threads,
    without_specialized,
)
from freezer.errors import JudgeError
from freezer.freezing.candidates import Candidate
from freezer.freezing.diagnostics import sentence
from freezer.freezing.drift import (
    Call,
    DriftReport,
    DriftRow,
    Extreme,
    Fresh,
    Gate,
    Runner,
    assess,
    at_ties,
    copied,
    distribution_problem,
    eager_reruns,
    report,
    run_calls,
    sampled,
)
from freezer.freezing.judging.budgets import Budget, worst
from freezer.freezing.judging.calling import calling_problem
from freezer.freezing.judging.judgement import Judgement, Trial
from freezer.freezing.judging.session import Session
from freezer.freezing.models import NamedTensors, Outputs, Subject, baked_in, call_source
from freezer.freezing.target import check_unlimited
from freezer.runtime.tensors import cloned, comparable, leaves_of
from freezer.runtime.torch_settings import threads
from freezer.spec import FLOAT32


def sharing_budget(session: Session, candidates: Sequence[Candidate]) -> Session:
    """The session in which so many candidates share the confidence of a budget."""
    if session.budget is None:
        return session
    num = sum(candidate.precision != FLOAT32 for candidate in candidates)
    return replace(session, budget=replace(session.budget, num_candidates=num))


def apply_gate(session: Session, judgement: Judgement) -> Judgement:
    """Run every candidate, and apply the drift gate."""
    return judgement.with_passing(lambda trial: run_trial(session, trial.candidate))


def run_trial(session: Session, candidate: Candidate) -> Trial:
    """Run a candidate in every way it may serve, and apply the gate."""
    try:
        return _judged(session, candidate)
    except Exception as error:  # a payload may raise anything; the others go on
        return Trial(candidate=candidate, problem=sentence(error, "run"))


def _judged(session: Session, candidate: Candidate) -> Trial:
    if candidate.lowering in ENGINES:  # it may have been built on another machine
        check_unlimited(session.target, ENGINES[candidate.payloads[0].kind])
    if candidate.precision == FLOAT32:
        session = replace(session, budget=None)
    if session.budget is not None:
        session = replace(session, gate=STRUCTURE_ALONE)
    rows = []
    ties = []
    random = None
    for num_threads, payloads in _ways_to_serve(session, candidate):
        fresh = partial(_runner, session.subject, candidate, payloads)
        with threads(num_threads):
            judged, calls, outputs = _run(session, fresh)
            if outputs and not (random or any(row.problem for row in judged)):
                random = _random_problem(session, fresh, outputs)
        ties.append(calls)
        for row in judged:
            payload = payload_at(payloads, session.subject.sets[row.set_index].point)
            path = payload.path if payload else ""
            rows.append(
                replace(row, recipe=candidate.recipe, num_threads=num_threads, payload=path)
            )
    drift = report(rows, session.gate)
    problem = drift.nearest_miss or random
    warnings = [*session.reference.warnings, *_tie_warnings(drift)]
    accuracy = None
    if problem is None and session.budget is not None:
        accuracy, problem = _accuracy(session, session.budget, candidate)
    if problem is None:
        problem, lost = _at_extremes(session, candidate)
        warnings += lost
    return Trial(
        candidate=replace(candidate, warnings=(*candidate.warnings, *warnings)),
        drift=drift,
        accuracy=accuracy,
        problem=problem,
        ties=ties[0] if ties else (),
    )


STRUCTURE_ALONE = Gate(error_ratio_max=1e30, float64=True)
"""The gate of a lower precision, whose errors its budget judges."""


def _accuracy(
    session: Session, budget: Budget, candidate: Candidate
) -> tuple[AccuracyRecord | None, str | None]:
    """Judge each payload of a candidate by the budget; return the worst record, and the first
    problem.
    """
    if not session.reference.deterministic or session.reference.stateful:
        return None, "the model draws random numbers or keeps state; no budget can judge it"
    records = []
    for payload in candidate.payloads:
        with threads(payload.num_threads or session.num_threads):
            model = candidate.open(session.subject, [payload])
            record, problem = budget.judge(model, payload, candidate.precision)
        if problem:
            where = f"{payload.path}: " if len(candidate.payloads) > 1 else ""
            return record, where + problem
        records.append(record)
    return worst(records), None


def _at_extremes(session: Session, candidate: Candidate) -> tuple[str | None, list[str]]:
    """What a candidate answers wrong at extreme inputs, or in other ways to call it; or else where
    it loses NaN and Inf, which is a problem if the limits say so.
    """
    reference = session.reference
    precision = candidate.precision if session.budget else FLOAT32
    num_threads, payloads = next(_ways_to_serve(session, candidate))
    fresh = partial(_runner, session.subject, candidate, payloads)
    lost: list[str] = []
    with threads(num_threads):
        runner = fresh()
        for extreme in reference.extremes:
            runner = fresh() if reference.stateful else runner
            try:
                answers = copied(runner.call(extreme.inputs))
            except Exception as error:  # eager answers
                return f"{extreme.name}: {sentence(error, 'run')}", []
            if extreme.missing:
                lost += filter(None, [extreme.lost(answers)])
            elif problem := _problem_at(extreme, answers, precision):
                return problem, []
        if len(reference.normal) == 2 and not reference.stateful:
            first, second = reference.normal
            if precision != FLOAT32:
                first, second = _as_alone(first, runner), _as_alone(second, runner)
            model = candidate.open(session.subject, payloads)
            if problem := calling_problem(model, first, second):
                return problem, []
    if lost and session.limits.nan == "keep":
        return f"{lost[0]}; limits.nan is keep", []
    return None, lost


def _problem_at(extreme: Extreme, answers: Sequence[Tensor], precision: str) -> str | None:
    """What is wrong with a candidate's outputs.

    For an empty mask, torch's fused transformer layers make NaN. Their parts, which captures have,
    make numbers: a candidate may answer with them.
    """
    problem = extreme.problem(answers, precision)
    if problem is None or _are_finite(extreme.eager) or not _are_finite(answers):
        return problem
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        model, spec = extreme.subject.fresh(), extreme.subject.spec
        eager = leaves_of(call_source(model, spec, cloned(extreme.inputs)))
        in_parts = replace(extreme, eager=[leaf.cpu() for leaf in eager])
        return problem if in_parts.problem(answers, precision) else None
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def _are_finite(outputs: Sequence[Tensor]) -> bool:
    return all(bool(output.isfinite().all()) for output in outputs)


def _as_alone(normal: Extreme, runner: Runner) -> Extreme:
    """A set with the answer of a candidate in place of eager's: it must repeat that."""
    return replace(normal, eager=copied(runner.call(normal.inputs)))


def _tie_warnings(drift: DriftReport) -> list[str]:
    """How many elements differ from eager because rounding decides them."""
    counts: Counter[str] = Counter()
    for row in drift.rows:
        counts[row.output] = max(counts[row.output], row.num_ties)
    return [
        f"output {name!r}: up to {count} elements of a set differ from eager where rounding decides"
        for name, count in counts.items()
        if count
    ]


def _run(session: Session, fresh: Fresh) -> tuple[list[DriftRow], Sequence[Call], Outputs]:
    """Run a candidate, and compare its outputs with the reference.

    Returns:
        The drift of every output in every call; the calls with the candidate's answers at ties, if
        ties explain a difference; and its outputs in every call if eager is not deterministic.
    """
    reference = session.reference
    outputs = []

    def calls() -> Iterator[Call]:
        """Make the calls one by one, so that only one call's outputs are in memory."""
        answers = run_calls(fresh, session.subject, stateful=reference.stateful)
        for call, leaves in zip(reference.calls, answers, strict=True):
            if len(leaves) != len(call.eager):
                raise JudgeError(f"{len(leaves)} outputs, eager gives {len(call.eager)}")
            if not reference.deterministic:
                outputs.append(leaves)
            noise = call.noise_rmse
            if session.budget:  # within which integers and bools may differ
                pairs = zip(call.noise_rmse, call.eager, strict=True)
                noise = [rmse if comparable(eager) else 1.0 for rmse, eager in pairs]
            yield replace(call, candidate=leaves, noise_rmse=noise)

    rows = assess(session.output_names, calls(), session.gate, reference.scales)
    exact = session.budget is None
    if exact and reference.deterministic and any(row.problem for row in rows):
        return *_without_ties(session, rows, list(calls())), []
    return rows, (), outputs


def _without_ties(
    session: Session, rows: list[DriftRow], again: list[Call]
) -> tuple[list[DriftRow], Sequence[Call]]:
    """Judge a candidate that failed again without its differences at ties: in the places of NaN and
    Inf alone, or else in all values.

    Args:
        session: the session.
        rows: drift with which it failed.
        again: its calls, made again.

    Returns:
        New rows and calls if it passes so, otherwise the given rows and no calls.
    """
    names, reference = session.output_names, session.reference
    failed = {names.index(row.output) for row in rows if row.problem}
    rerun = eager_reruns(session.subject, stateful=reference.stateful)
    for only_misplaced in (True, False):
        settled = at_ties(again, failed, rerun, only_misplaced=only_misplaced)
        if settled is None:
            continue
        calls, ties = settled
        judged = assess(names, calls, session.gate, reference.scales)
        if any(row.problem for row in judged):
            continue
        for call, masks in enumerate(ties):
            for output, tied in masks.items():
                number = output * len(calls) + call  # `assess` returns one output after the other
                judged[number] = replace(judged[number], num_ties=int(tied.sum()))
        return judged, calls
    return rows, ()


def _ways_to_serve(
    session: Session, candidate: Candidate
) -> Iterator[tuple[int, tuple[Payload, ...]]]:
    """Thread count and payloads of all ways a candidate may serve, the deciding one first.

    Where payloads for single points may still be dropped, serving those points without them is a
    way of its own.
    """
    for count in session.target.thread_counts:
        payloads = payloads_for_threads(candidate.payloads, count)
        if not payloads:  # not built for this count
            continue
        yield count, payloads
        may_go = len(session.subject.points) > 1 or count != session.num_threads
        if may_go and without_specialized(payloads) != payloads:
            yield count, without_specialized(payloads)


def _runner(subject: Subject, candidate: Candidate, payloads: Sequence[Payload]) -> Runner:
    """A newly opened instance of a candidate."""
    model = candidate.open(subject, payloads)

    def call(tensors: NamedTensors) -> list[Tensor]:
        return [tensor.cpu() for tensor in leaves_of(model(**cloned(tensors)))]

    return Runner(
        call=call,
        reset=model.preserved[subject.reset] if subject.reset else None,
    )


def _random_problem(session: Session, fresh: Fresh, outputs: Outputs) -> str | None:
    """Detect constants in place of a model's random numbers, and other distributions; return the
    problem or None.
    """
    reference, subject = session.reference, session.subject
    of_first = [index for index, call in enumerate(reference.calls) if call.set_index == 0]
    problem = baked_in(
        [reference.calls[index].eager for index in of_first],
        [outputs[index] for index in of_first],
        partial(fresh().call, subject.sets[0].tensors),
    )
    if problem:
        return problem
    runs = [sampled(outputs)]
    for _ in reference.runs[1:]:
        runs.append(sampled(list(run_calls(fresh, subject, stateful=reference.stateful))))
    return distribution_problem(session.output_names, reference.runs, runs)
