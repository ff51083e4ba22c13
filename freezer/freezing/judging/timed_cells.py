"""Cells: time eager and the candidates at each thread count and point.

The first cell decides the verdict. The winner is also timed at the middle and the largest sizes, to
know where it is slower than eager.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from freezer.artifact import ENGINES, payload_at, payloads_for_threads, without_specialized
from freezer.freezing.candidates import Candidate
from freezer.freezing.in_hand import take
from freezer.freezing.judging.judgement import Cell, Judgement, Trial, general, recorded
from freezer.freezing.judging.payload_gains import kept_payloads, point_figures
from freezer.freezing.judging.session import Session
from freezer.freezing.judging.verdicts import could_win
from freezer.freezing.models import Subject
from freezer.freezing.recipes import EAGER
from freezer.freezing.target import working_conditions
from freezer.runtime.frozen_model import FrozenModel
from freezer.runtime.input_sets import distinct_at, on_device
from freezer.runtime.torch_settings import threads
from freezer.spec import Point, SamplingPolicy, bind, timing_of
from freezer.timing import Rivals, Sampling, meter_of, sample

_Call = Callable[[], object]

_LEAST_S = 0.5
"""Least time of each further cell."""

BRIEF_S = 2.0
"""Time limit of a short timing."""

CONFIRMED = 0.9
"""Share of the lower bound of an inherited speedup that a short timing must reach."""


def time_entrants(session: Session, judgement: Judgement) -> Judgement:
    """Time eager, the passing candidates and the incumbent at every point, the deciding one first.

    Payloads that gain nothing are dropped.
    """
    if not judgement.passing:
        return judgement
    cells = _time_points(session, judgement)

    def kept(trial: Trial) -> Trial:
        candidate, dropped = kept_payloads(session, trial.candidate, cells)
        return replace(trial, candidate=candidate, dropped=dropped)

    return with_figures(session, judgement.with_passing(kept), cells)


def with_figures(session: Session, judgement: Judgement, cells: Sequence[Cell]) -> Judgement:
    """The judgement with cells, and with latencies and speedups of all trials that they timed."""
    policy, timing, num = session.policy, timing_of(session.objective), len(judgement.passing)
    deciding = cells[0]

    def timed(trial: Trial) -> Trial:
        return replace(
            trial,
            latency_ms=recorded(deciding.sampling.percentiles(trial.recipe, policy)),
            speedup=deciding.faster(trial.recipe, EAGER, num, policy, timing),
            points=tuple(point_figures(trial.candidate, cells, policy, num)),
        )

    return replace(
        judgement.with_passing(timed),
        cells=cells,
        eager_ms=deciding.sampling.percentiles(EAGER, policy),
        old=judgement.old and timed(judgement.old),
    )


def _time_points(session: Session, judgement: Judgement) -> list[Cell]:
    """Time all entrants at the deciding point, and the candidates at the others.

    At the deciding point, candidates that are clearly slower than another are not timed to the end;
    nor at the other points.
    """
    threads, old = session.num_threads, judgement.old
    deciding_point, *points = session.subject.points
    candidates = [trial.candidate for trial in judgement.passing]
    competing = [*candidates, old.candidate] if old else candidates
    entrants = [deciding_alone(session, candidate) for candidate in competing]
    rivals = _rivals(entrants, could_win(session, judgement.passing))
    policy, further_policy = shares(session)
    first = time_cell(
        session.subject,
        entrants,
        threads,
        deciding_point,
        policy,
        rivals=rivals,
    )
    to_the_end = [each for each in candidates if not first.sampling.stopped(each.recipe)]
    further = [time_cell(session.subject, to_the_end, threads, at, further_policy) for at in points]
    return [first, *further]


def deciding_alone(session: Session, candidate: Candidate) -> Candidate:
    """A candidate with the payload that serves in the deciding cell, and no other."""
    payloads = payloads_for_threads(candidate.payloads, session.num_threads)
    deciding = payload_at(payloads, session.subject.points[0])
    assert deciding is not None, "every recipe builds a payload for all sizes"
    return replace(candidate, payloads=(deciding,))


def _rivals(candidates: Sequence[Candidate], able: Sequence[str]) -> Rivals:
    """The rivals of each entrant, of which one that is clearly faster makes it needless.

    One that needs torch alone may serve beside a winner that needs an engine (payload_sets): only
    its like make it needless.
    """
    rivals = {}
    for candidate in candidates:
        names = set()
        for rival in candidates:
            alike = candidate.lowering in ENGINES or rival.lowering not in ENGINES
            if alike and rival.recipe in able and rival is not candidate:
                names.add(rival.recipe)
        rivals[candidate.recipe] = names
    return rivals


def time_sizes(
    session: Session, candidates: Sequence[Candidate], sizes: Sequence[Point]
) -> list[Cell]:
    """Time eager and candidates at sizes.

    A size at which the least number of rounds takes longer than twice the time limit is not
    measured: its cell has no samples.
    """
    _, policy = shares(session)
    threads, most_s = session.num_threads, 2 * session.policy.time_limit_s
    return [
        time_cell(session.subject, candidates, threads, size, policy, most_s=most_s)
        for size in sizes
    ]


def time_further_threads(
    session: Session, winner: Candidate, thread_counts: Sequence[int]
) -> list[Cell]:
    """Time eager and the winner at every point with further thread counts that it has payloads
    for.
    """
    places = list(itertools.product(thread_counts, session.subject.points))
    policy = _share_of(session.policy, len(places))
    return [time_cell(session.subject, [winner], count, at, policy) for count, at in places]


def confirm_inherited(session: Session, judgement: Judgement) -> tuple[Judgement, str]:
    """Time the winner shortly at the deciding point, where it inherits a speed.

    Returns:
        The judgement with what was measured, unless others disturbed it; and why the inherited
        speed does not hold, or an empty text.
    """
    winner, point = judgement.winner, session.subject.points[0]
    assert winner is not None, "it inherits a speed"
    assert winner.speedup is not None, "it inherits a speed"
    policy = replace(session.policy, time_limit_s=BRIEF_S, warmup_s=_LEAST_S)
    entrant = deciding_alone(session, winner.candidate)
    with working_conditions(session.target):
        cell = time_cell(session.subject, [entrant], session.num_threads, point, policy)
    faster = cell.faster(winner.recipe, EAGER, 1, policy, timing_of(session.objective))
    if faster is None or faster.clock == "disturbed":
        return judgement, ""
    if faster.high < CONFIRMED * winner.speedup.low:
        return (
            judgement,
            f"{winner.recipe} is {faster} times as fast as eager, not {winner.speedup}",
        )
    note = f"; a short timing confirms it ({faster})"
    return replace(judgement, reason=judgement.reason + note), ""


def shares(session: Session) -> tuple[SamplingPolicy, SamplingPolicy]:
    """The policies of the deciding cell, and of each at the other points and the further sizes.

    The deciding cell has half of the time limit, and the further ones share a quarter, as those of
    further threads do.
    """
    num_further = len(session.subject.points) - 1 + len(session.further_sizes)
    deciding = replace(session.policy, time_limit_s=session.policy.time_limit_s / 2)
    return deciding, _share_of(session.policy, num_further)


def _share_of(policy: SamplingPolicy, num_cells: int) -> SamplingPolicy:
    """The policy of each of some cells that share a quarter of the time limit.

    Only the deciding cell needs the calls of an objective.
    """
    return replace(
        policy,
        time_limit_s=max(policy.time_limit_s / 4 / max(num_cells, 1), _LEAST_S),
        warmup_s=policy.warmup_s / 2,
        min_samples=0,
    )


def time_cell(
    subject: Subject,
    candidates: Sequence[Candidate],
    num_threads: int,
    point: Point,
    policy: SamplingPolicy,
    *,
    most_s: float | None = None,
    rivals: Rivals | None = None,
) -> Cell:
    """Time one cell with freshly opened payloads; `most_s` and `rivals` as in `_time_at`."""
    paths = {}
    models = {}
    with threads(num_threads):
        for candidate in candidates:
            payloads = payloads_for_threads(candidate.payloads, num_threads)
            serving = {candidate.recipe: payload_at(payloads, point)}
            for_all = payload_at(without_specialized(payloads), point)
            if for_all is not serving[candidate.recipe]:
                serving[general(candidate.recipe)] = for_all
            for name, payload in serving.items():
                if payload is not None:
                    paths[name] = payload.path
                    models[name] = candidate.open(subject, [payload])
        sampling = _time_at(subject, point, models, policy, most_s, rivals)
    return Cell(
        num_threads=num_threads,
        point=point,
        sampling=sampling,
        payloads=paths,
    )


def _time_at(
    subject: Subject,
    point: Point,
    candidates: Mapping[str, FrozenModel],
    policy: SamplingPolicy,
    most_s: float | None,
    rivals: Rivals | None,
) -> Sampling:
    """Time eager and candidates, interleaved, at a point. If the fewest rounds take longer than
    `most_s`, take no samples.

    `rivals` as in `sample`, also of entrants that are not timed here.
    """
    eager = subject.fresh()
    calls = _calls(subject, point, {EAGER: partial(without_grad, eager), **candidates})
    resets = {}
    if subject.reset is not None:
        resets = {name: model.preserved[subject.reset] for name, model in candidates.items()}
        resets[EAGER] = partial(without_grad, getattr(eager, subject.reset))
    activity = f"timing {point}"
    begin = {name: partial(_begin, name, activity, resets.get(name)) for name in calls}
    with meter_of(subject.device, policy) as meter:
        if most_s is not None:
            begin[next(reversed(calls))]()  # eager has had all sizes before
            least_s = policy.min_rounds * _round_s(calls, meter.timed_ms)
            if least_s > most_s:
                return Sampling(
                    samples_ms={name: [] for name in calls},
                    num_dropped=0,
                    settled=False,
                    stable=False,
                )
            policy = replace(policy, time_limit_s=max(policy.time_limit_s, least_s))
        return sample(calls, policy, begin, meter, rivals)


def _begin(name: str, activity: str, reset: _Call | None) -> None:
    """Have an entrant in hand, in its initial state if it has a reset."""
    recipe = "" if name == EAGER else name.removesuffix(general(""))
    take(recipe, activity)
    if reset is not None:
        reset()


def _round_s(calls: Mapping[str, Sequence[_Call]], timed_ms: Callable[[_Call], float]) -> float:
    """Time of a first round, in seconds: the faster of two calls of each entrant."""
    round_s = 0.0
    for each in calls.values():
        first, second = (*each, each[0])[:2]
        round_s += min(timed_ms(first), timed_ms(second)) / 1e3
    return round_s


def without_grad(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function without gradients, as a frozen model is called."""
    with torch.no_grad():
        return function(*args, **kwargs)


def _calls(
    subject: Subject, point: Point, models: Mapping[str, Callable[..., object]]
) -> dict[str, list[_Call]]:
    """The calls of each entrant at a point, with its own copies of the inputs, bound before
    timing.
    """
    sets = distinct_at(subject.spec, subject.on_host.sets, point)
    inputs = [on_device(host_inputs, subject.device) for host_inputs in sets]
    calls: dict[str, list[_Call]] = {}
    for name, model in models.items():
        calls[name] = []
        for input_set in inputs:
            args, kwargs = bind(subject.spec, input_set.cloned())
            calls[name].append(partial(model, *args, **kwargs))
    return calls
