"""Cells: one thread count and one point each, where eager and the candidates are timed; and which payloads gain enough to be kept.

The first cell decides the verdict, and what it decides is always kept. Any other payload must earn its place:

    for a single point, it must be faster there than the payload that would serve the point without it
    at a further thread count, the best of its payloads must be faster than eager there by `speedup_min`, else all of them go

Both by the lower bound of the paired bootstrap of timing/sampling.py. What is left out is told with its figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from freezer.artifact.manifest import Payload
from freezer.artifact.payload_selection import is_special, serving, set_for, without_special
from freezer.artifact.sections import Dropped, PointFigures
from freezer.freezing.candidates.candidate import Candidate
from freezer.freezing.models.subject import Subject
from freezer.freezing.recipes.recipes import EAGER
from freezer.freezing.target.target import Target
from freezer.freezing.validation.candidate_timing import time_at
from freezer.limits import Limits, SamplingPolicy
from freezer.runtime.threads import threads
from freezer.timing.sampling import Sampling, Speedup, speedup

LEAST_SHARE = 0.1
"""Of the judge's time limit, what each further cell has at least: less tells nothing."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What was timed at one thread count and point.

    Attributes:
        point: sizes by dim name.
        sampling: of all entrants, side by side.
        payloads: by entrant, the path of the payload that served it; eager has none.
    """

    num_threads: int
    point: Mapping[str, int]
    sampling: Sampling
    payloads: Mapping[str, str]

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.point.items())
        return f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}" + (f", {sizes}" if sizes else "")


def general(recipe: str) -> str:
    """The entrant's name of a recipe's payload for all sizes, where one for a single point serves the recipe itself."""
    return f"{recipe}, all sizes"


def time_cells(subject: Subject, candidates: Sequence[Candidate], target: Target, policy: SamplingPolicy) -> tuple[Cell, ...]:
    """Time eager and candidates at every thread count and point, the deciding one first; no cell where there is no candidate.

    Args:
        subject: the model, and the points.
        candidates: those that passed the drift gate.
        target: the thread counts.
        policy: of one judge's sampling, which the cells share.
    """
    places = [(count, point) for count in target.thread_counts for point in subject.points]
    policies = shared_out(policy, len(places))
    if not candidates:
        return ()
    return tuple(_time_cell(subject, candidates, *place, each) for place, each in zip(places, policies, strict=True))


def shared_out(policy: SamplingPolicy, num_cells: int) -> list[SamplingPolicy]:
    """The policy of each cell: half of the time limit for the deciding one, and the other half for all others together."""
    if num_cells == 1:
        return [policy]
    rest = max(policy.time_limit_s / 2 / (num_cells - 1), policy.time_limit_s * LEAST_SHARE)
    further = replace(policy, time_limit_s=rest, warmup_s=policy.warmup_s / 2)
    return [replace(policy, time_limit_s=policy.time_limit_s / 2), *[further] * (num_cells - 1)]


def _time_cell(
    subject: Subject, candidates: Sequence[Candidate], num_threads: int, point: Mapping[str, int], policy: SamplingPolicy
) -> Cell:
    """One cell. Payloads are opened for it anew, in their initial state, and closed after it."""
    serve: dict[str, tuple[Candidate, Payload]] = {}
    for candidate in candidates:
        held = set_for(candidate.payloads, num_threads)
        first, other = serving(held, point), serving(without_special(held), point)
        assert first is not None, "every recipe makes a payload for all sizes"
        serve[candidate.recipe] = candidate, first
        if other is not None and other is not first:
            serve[general(candidate.recipe)] = candidate, other
    with threads(num_threads):
        models = {name: candidate.open(subject, [payload]) for name, (candidate, payload) in serve.items()}
        sampling = time_at(point, subject, models, policy)
    return Cell(
        num_threads=num_threads,
        point=point,
        sampling=sampling,
        payloads={name: payload.path for name, (_, payload) in serve.items()},
    )


def figures_of(candidate: Candidate, cells: Sequence[Cell], policy: SamplingPolicy, num_candidates: int) -> Iterator[PointFigures]:
    """How fast each payload of a candidate is wherever it was timed, in the order of the cells."""
    held = {payload.path for payload in candidate.payloads}
    for cell in cells:
        for name in (candidate.recipe, general(candidate.recipe)):
            if cell.payloads.get(name) in held:
                ms, faster = cell.sampling.percentiles(name, policy), _faster(cell, name, EAGER, num_candidates, policy)
                yield PointFigures(
                    num_threads=cell.num_threads,
                    point=cell.point,
                    payload=cell.payloads[name],
                    eager_p50=cell.sampling.percentiles(EAGER, policy).get("p50"),
                    p50=ms.get("p50"),
                    p90=ms.get("p90"),
                    p99=ms.get("p99"),
                    speedup=faster.value if faster else None,
                    speedup_ci=(faster.low, faster.high) if faster else None,
                )


def kept(
    candidate: Candidate, cells: Sequence[Cell], limits: Limits, policy: SamplingPolicy
) -> tuple[Candidate, tuple[Dropped, ...]]:
    """The candidate with the payloads that are kept, and what was left out of it."""
    dropped: list[Dropped] = []
    for count in dict.fromkeys(payload.num_threads for payload in candidate.payloads):
        if count is None:
            continue  # it fits any
        at_count = set_for(candidate.payloads, count)
        if count != cells[0].num_threads and (why := _gains_nothing(candidate, count, cells, limits, policy)):
            dropped += [Dropped(payload=payload.path, num_threads=count, reason=why) for payload in at_count]
            continue
        for payload in at_count:
            if is_special(payload, at_count) and (why := _no_faster(candidate, payload, count, cells, policy)):
                dropped.append(Dropped(payload=payload.path, num_threads=count, reason=why))
    gone = {item.payload for item in dropped}
    if not gone:
        return candidate, ()
    payloads = tuple(payload for payload in candidate.payloads if payload.path not in gone)
    reports = {path: report for path, report in candidate.reports.items() if path not in gone}
    return replace(candidate, payloads=payloads, reports=reports), tuple(dropped)


def _gains_nothing(candidate: Candidate, count: int, cells: Sequence[Cell], limits: Limits, policy: SamplingPolicy) -> str | None:
    """Why a further thread count is left out; None where the best payload for it is fast enough there."""
    entrants = [
        (cell, name)
        for cell in cells
        if cell.num_threads == count
        for name in (candidate.recipe, general(candidate.recipe))
        if name in cell.payloads
    ]
    found = [(faster, cell) for cell, name in entrants if (faster := _faster(cell, name, EAGER, len(entrants), policy))]
    if not found:
        return f"with {count} threads the machine was too disturbed to tell"
    best, cell = max(found, key=lambda item: item[0].low)
    if best.low > limits.speedup_min:
        return None
    return (
        f"at its best ({cell}) it is {best.value:.2f} times as fast as eager, at least {best.low:.2f}; "
        f"speedup_min is {limits.speedup_min:g}"
    )


def _no_faster(candidate: Candidate, payload: Payload, count: int, cells: Sequence[Cell], policy: SamplingPolicy) -> str | None:
    """Why a payload for a single point is left out; None where it is faster there than what would serve, or decides the verdict."""
    cell = next(cell for cell in cells if cell.num_threads == count and cell.payloads.get(candidate.recipe) == payload.path)
    if cell is cells[0]:
        return None
    other = cell.payloads[general(candidate.recipe)]
    gain = _faster(cell, candidate.recipe, general(candidate.recipe), 1, policy)
    if gain is None:
        return f"at {cell} the machine was too disturbed to tell; {other} serves"
    if gain.low > 1.0:
        return None
    return f"at {cell} it is {gain.value:.2f} times as fast as {other}, at least {gain.low:.2f}; that serves"


def _faster(cell: Cell, name: str, other: str, num_candidates: int, policy: SamplingPolicy) -> Speedup | None:
    if not cell.sampling.stable:
        return None
    return speedup(cell.sampling, name, eager=other, num_candidates=num_candidates, policy=policy)
