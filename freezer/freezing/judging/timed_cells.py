"""Cells: time eager and the candidates at each thread count and point, and select the payloads
worth keeping.

The winner is also timed at the middle and the largest sizes, to know where it is slower than eager.

The first cell decides the verdict; its payload is always kept. Any other payload is kept only if it
gains:

    for a single point, it must be faster there than the payload that would otherwise serve the
    point for a further thread count, the best of its payloads must exceed `speedup_min` over eager,
    else all of them are dropped

Both use the lower bound of the paired bootstrap (timing/sampling.py). Dropped payloads are recorded
with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from freezer.artifact import (
    ENGINES,
    Dropped,
    Payload,
    PointFigures,
    PointVerdict,
    is_specialized,
    payload_at,
    payloads_for_threads,
    place_text,
    without_specialized,
)
from freezer.freezing.candidates import Candidate
from freezer.freezing.models import Subject
from freezer.freezing.recipes import EAGER, KEPT_EAGER
from freezer.runtime.frozen_model import FrozenModel
from freezer.runtime.input_sets import InputSet, distinct_at, on_device
from freezer.runtime.torch_settings import threads
from freezer.spec import Limits, SamplingPolicy, Timing, bind
from freezer.timing import Rivals, Sampling, Speedup, meter_of, sample, speedup

CAPTURED = KEPT_EAGER.name
"""Entrant name of the captured program (slow_sizes.py)."""

PREVIOUS = "previous"
"""Entrant name of the artifact that serves now (incumbent.py)."""

_LEAST_SHARE = 0.1
"""Minimum share of the judge's time limit for each further cell."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Latency samples at one thread count and point.

    Attributes:
        point: sizes by dim name.
        sampling: samples of all entrants, interleaved.
        payloads: path of the payload that served each entrant; eager has none.
    """

    num_threads: int
    point: Mapping[str, int]
    sampling: Sampling
    payloads: Mapping[str, str]

    def faster(
        self,
        name: str,
        other: str,
        num_candidates: int,
        policy: SamplingPolicy,
        timing: Timing = "p50",
    ) -> Speedup | None:
        """Speedup of one entrant over another, by medians by default; None if the machine was too
        disturbed.
        """
        if not self.sampling.stable:
            return None
        return speedup(
            self.sampling,
            name,
            eager=other,
            num_candidates=num_candidates,
            policy=policy,
            timing=timing,
        )

    def __str__(self) -> str:
        return place_text(self.num_threads, self.point)


def general(recipe: str) -> str:
    """Entrant name of a recipe's payload for all sizes, where a payload for a single point serves
    under the recipe's name.
    """
    return f"{recipe}, all sizes"


def time_cells(
    subject: Subject,
    candidates: Sequence[Candidate],
    num_threads: int,
    policy: SamplingPolicy,
    rivals: Sequence[str] = (),
    incumbent: Candidate | None = None,
) -> tuple[Cell, ...]:
    """Time eager and the candidates at every point, the deciding one first.

    At the deciding point, candidates that are clearly slower than another are not timed to the end;
    nor at the other points.

    Args:
        subject: the model and its points.
        candidates: the candidates that passed the drift gate; without any, no cell is timed.
        num_threads: the deciding thread count.
        policy: the sampling policy; the cells share its time limit with `time_sizes`.
        rivals: recipes of the candidates that could win by being the fastest.
        incumbent: the artifact that serves now, an entrant of the deciding cell.
    """
    if not candidates:
        return ()
    first, *others = zip(
        subject.points,
        shared_out(policy, len(subject.points) + len(_further_sizes(subject))),
        strict=False,
    )
    entrants = [*candidates, incumbent] if incumbent else candidates
    deciding = _time_cell(subject, entrants, num_threads, *first, rivals=_rivals(entrants, rivals))
    left = [
        candidate for candidate in candidates if not deciding.sampling.stopped(candidate.recipe)
    ]
    return deciding, *(_time_cell(subject, left, num_threads, *each) for each in others)


def _rivals(candidates: Sequence[Candidate], rivals: Sequence[str]) -> Rivals:
    """The rivals of each entrant, of which one that is clearly faster makes it needless.

    One that needs torch alone may serve beside a winner that needs an engine (torch_only.py): only
    its like make it needless.
    """
    able = [item for item in candidates if item.recipe in rivals]
    return {
        name: {
            other.recipe
            for other in able
            if other is not item and (item.lowering in ENGINES or other.lowering not in ENGINES)
        }
        for item in candidates
        for name in (item.recipe, general(item.recipe))
    }


def time_sizes(
    subject: Subject,
    candidates: Sequence[Candidate],
    num_threads: int,
    policy: SamplingPolicy,
    sizes: Sequence[Mapping[str, int]] | None = None,
) -> tuple[Cell, ...]:
    """Time eager and candidates at sizes, by default the middle and the largest.

    A size at which the least number of rounds takes longer than twice the time limit is not
    measured: its cell has no samples.
    """
    further = _further_sizes(subject)
    shared = shared_out(policy, len(subject.points) + len(further))[-1]
    return tuple(
        _time_cell(subject, candidates, num_threads, size, shared, most_s=2 * policy.time_limit_s)
        for size in (further if sizes is None else sizes)
    )


def time_further_threads(
    subject: Subject, winner: Candidate, thread_counts: Sequence[int], policy: SamplingPolicy
) -> tuple[Cell, ...]:
    """Time eager and the winner at every point with further thread counts that it has payloads for,
    in half of the time limit.
    """
    places = [(count, point) for count in thread_counts for point in subject.points]
    shared = shared_out(policy, 1 + len(places))[-1]
    return tuple(_time_cell(subject, [winner], *place, shared) for place in places)


def _further_sizes(subject: Subject) -> tuple[Mapping[str, int], ...]:
    return subject.spec.further_sizes(subject.points)


def shared_out(policy: SamplingPolicy, num_cells: int) -> list[SamplingPolicy]:
    """The policy of each cell: half of the time limit for the deciding cell, the other half shared
    by the others.

    Only the deciding cell needs the calls of an objective.
    """
    if num_cells == 1:
        return [policy]
    rest = max(policy.time_limit_s / 2 / (num_cells - 1), policy.time_limit_s * _LEAST_SHARE)
    further = replace(policy, time_limit_s=rest, warmup_s=policy.warmup_s / 2, min_samples=0)
    return [replace(policy, time_limit_s=policy.time_limit_s / 2), *[further] * (num_cells - 1)]


def _time_cell(
    subject: Subject,
    candidates: Sequence[Candidate],
    num_threads: int,
    point: Mapping[str, int],
    policy: SamplingPolicy,
    *,
    most_s: float | None = None,
    rivals: Rivals | None = None,
) -> Cell:
    """Time one cell with freshly opened payloads; `most_s` and `rivals` as in `_time_at`."""
    serve: dict[str, tuple[Candidate, Payload]] = {}
    for candidate in candidates:
        held = payloads_for_threads(candidate.payloads, num_threads)
        first, other = payload_at(held, point), payload_at(without_specialized(held), point)
        assert first is not None, "every recipe builds a payload for all sizes"
        serve[candidate.recipe] = candidate, first
        if other is not None and other is not first:
            serve[general(candidate.recipe)] = candidate, other
    with threads(num_threads):
        models = {
            name: candidate.open(subject, [payload]) for name, (candidate, payload) in serve.items()
        }
        sampling = _time_at(point, subject, models, policy, most_s=most_s, rivals=rivals)
    paths = {name: payload.path for name, (_, payload) in serve.items()}
    return Cell(num_threads=num_threads, point=point, sampling=sampling, payloads=paths)


def _time_at(
    point: Mapping[str, int],
    subject: Subject,
    candidates: Mapping[str, FrozenModel],
    policy: SamplingPolicy,
    *,
    most_s: float | None,
    rivals: Rivals | None,
) -> Sampling:
    """Time eager and candidates, interleaved, at a point. If the fewest rounds take longer than
    `most_s`, take no samples.

    `rivals` as in `sample`, also of entrants that are not timed here.
    """
    inputs = [
        on_device(item, subject.device)
        for item in distinct_at(subject.spec, subject.on_host.sets, point)
    ]
    eager = subject.fresh()
    for part in eager.modules():
        if isinstance(part, nn.RNNBase):
            # on a GPU, calls of a copy would flatten its weights each time
            part.flatten_parameters()
    models: dict[str, Callable[..., Any]] = {EAGER: partial(without_grad, eager), **candidates}
    resets: dict[str, Callable[[], object]] = {}
    if subject.reset is not None:
        resets = {name: model.preserved[subject.reset] for name, model in candidates.items()}
        resets[EAGER] = partial(without_grad, getattr(eager, subject.reset))
    with meter_of(subject.device, policy) as meter:
        calls = {name: _calls(model, subject, inputs) for name, model in models.items()}
        if most_s is not None:
            first_ms = {
                name: [meter.timed_ms(call) for call in (own * 2)[:2]]
                for name, own in calls.items()
            }
            least_s = policy.min_rounds * sum(min(taken) for taken in first_ms.values()) / 1e3
            if least_s > most_s:
                return Sampling(
                    samples_ms={name: [] for name in calls},
                    num_dropped=0,
                    settled=False,
                    stable=False,
                )
            policy = replace(policy, time_limit_s=max(policy.time_limit_s, least_s))
        return sample(calls, policy, resets, meter, rivals)


def without_grad(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function without gradients, as a frozen model is called."""
    with torch.no_grad():
        return function(*args, **kwargs)


def _calls(
    model: Callable[..., Any], subject: Subject, inputs: Sequence[InputSet]
) -> list[Callable[[], Any]]:
    bound = [
        bind(subject.spec, item.cloned()) for item in inputs
    ]  # each entrant gets its own copies, bound before timing
    return [partial(model, *args, **kwargs) for args, kwargs in bound]


def figures_of(
    candidate: Candidate, cells: Sequence[Cell], policy: SamplingPolicy, num_candidates: int
) -> Iterator[PointFigures]:
    """Latency of each payload of a candidate in each cell, in the order of the cells."""
    held = {payload.path for payload in candidate.payloads}
    for cell in cells:
        for name in dict.fromkeys(
            (CAPTURED, candidate.recipe, general(candidate.recipe))
        ):  # the first serves
            if cell.payloads.get(name) in held:
                ms, faster = (
                    cell.sampling.percentiles(name, policy),
                    cell.faster(name, EAGER, num_candidates, policy),
                )
                yield PointFigures(
                    num_threads=cell.num_threads,
                    point=cell.point,
                    payload=cell.payloads[name],
                    eager_p50=cell.sampling.percentiles(EAGER, policy).get("p50"),
                    **{key: ms.get(key) for key in ("p50", "p90", "p99")},
                    speedup=faster.value if faster else None,
                    speedup_ci=(faster.low, faster.high) if faster else None,
                    verdict=_verdict(cell.sampling, faster),
                    clock=cell.sampling.clock,
                )


def _verdict(sampling: Sampling, faster: Speedup | None) -> PointVerdict:
    if faster is None:
        return "unstable" if sampling.num_dropped or sampling.samples_ms[EAGER] else "not measured"
    return "faster" if faster.low > 1 else "slower" if faster.high < 1 else "not slower"


def kept(
    candidate: Candidate, cells: Sequence[Cell], limits: Limits, policy: SamplingPolicy
) -> tuple[Candidate, tuple[Dropped, ...]]:
    """The candidate with the payloads worth keeping, and the dropped ones."""
    dropped: list[Dropped] = []
    for count in dict.fromkeys(
        payload.num_threads for payload in candidate.payloads if payload.num_threads is not None
    ):
        at_count, here = (
            payloads_for_threads(candidate.payloads, count),
            [cell for cell in cells if cell.num_threads == count],
        )
        nothing = (
            _gains_nothing(candidate, count, here, limits, policy)
            if count != cells[0].num_threads
            else None
        )
        for payload in at_count:
            why = nothing or (
                _no_faster(candidate, payload, here, cells[0], policy)
                if is_specialized(payload, at_count)
                else None
            )
            if why is not None:
                dropped.append(Dropped(payload=payload.path, num_threads=count, reason=why))
    return candidate.without({item.payload for item in dropped}), tuple(dropped)


def _gains_nothing(
    candidate: Candidate, count: int, cells: Sequence[Cell], limits: Limits, policy: SamplingPolicy
) -> str | None:
    """Why the payloads of a further thread count are dropped; None if the best of them is fast
    enough.
    """
    names = (candidate.recipe, general(candidate.recipe))
    entrants = [(cell, name) for cell in cells for name in names if name in cell.payloads]
    found = [
        (faster, cell)
        for cell, name in entrants
        if (faster := cell.faster(name, EAGER, len(entrants), policy))
    ]
    if not found:
        return f"with {place_text(count, {})} the machine was too disturbed to measure"
    best, cell = max(found, key=lambda item: item[0].low)
    if best.low > limits.speedup_min:
        return None
    return (
        f"at best ({cell}) {best.value:.2f} times as fast as eager, at least {best.low:.2f};"
        f" speedup_min is {limits.speedup_min:g}"
    )


def _no_faster(
    candidate: Candidate,
    payload: Payload,
    cells: Sequence[Cell],
    deciding: Cell,
    policy: SamplingPolicy,
) -> str | None:
    """Why the payload of a point is dropped; None if it decides, was not timed, or is faster than
    the payload for all sizes.
    """
    cell = next(
        (cell for cell in cells if cell.payloads.get(candidate.recipe) == payload.path), None
    )
    if cell is None or cell is deciding:  # None: stopped at the deciding point
        return None
    other = cell.payloads[general(candidate.recipe)]
    gain = cell.faster(candidate.recipe, general(candidate.recipe), 1, policy)
    if gain is None:
        return f"at {cell} the machine was too disturbed to measure; {other} serves"
    if gain.low > 1.0:
        return None
    return (
        f"at {cell} {gain.value:.2f} times as fast as {other}, at least {gain.low:.2f}; {other}"
        " serves"
    )
