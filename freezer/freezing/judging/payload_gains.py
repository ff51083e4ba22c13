"""Which payloads of a candidate are kept, from its latency in the timed cells.

The payload of the first cell is always kept. Any other payload is kept only if it gains:

    for a single point, it must be faster there than the payload that would otherwise serve the
    point for a further thread count, the best of its payloads must exceed `speedup_min` over eager,
    else all of them are dropped

Both use the lower bound of the interval (timing/intervals.py). Dropped payloads are recorded
with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from freezer.artifact import (
    Dropped,
    Payload,
    PointFigures,
    PointVerdict,
    is_specialized,
    payloads_for_threads,
    place_text,
)
from freezer.freezing.candidates import Candidate
from freezer.freezing.judging.judgement import CAPTURED, Cell, general
from freezer.freezing.judging.session import Session
from freezer.freezing.recipes import EAGER
from freezer.spec import SamplingPolicy
from freezer.timing import Sampling, Speedup


def point_figures(
    candidate: Candidate,
    cells: Sequence[Cell],
    policy: SamplingPolicy,
    num_candidates: int,
) -> Iterator[PointFigures]:
    """Latency of each payload of a candidate in each cell, in the order of the cells."""
    paths = {payload.path for payload in candidate.payloads}
    entrants = dict.fromkeys((CAPTURED, candidate.recipe, general(candidate.recipe)))
    for cell in cells:
        eager = cell.sampling.percentiles(EAGER, policy)
        for entrant in entrants:  # the first serves
            if cell.payloads.get(entrant) not in paths:
                continue
            values = cell.sampling.percentiles(entrant, policy)
            faster = cell.faster(entrant, EAGER, num_candidates, policy)
            yield PointFigures(
                num_threads=cell.num_threads,
                point=cell.point,
                payload=cell.payloads[entrant],
                eager_p50=eager.get("p50"),
                p50=values.get("p50"),
                p90=values.get("p90"),
                p99=values.get("p99"),
                speedup=faster.value if faster else None,
                speedup_ci=(faster.low, faster.high) if faster else None,
                verdict=_verdict(cell.sampling, faster),
                clock=cell.sampling.clock,
            )


def _verdict(sampling: Sampling, faster: Speedup | None) -> PointVerdict:
    if faster is None:
        return "unstable" if sampling.num_dropped or sampling.samples_ms[EAGER] else "not measured"
    if faster.low > 1:
        return "faster"
    return "slower" if faster.high < 1 else "not slower"


def kept_payloads(
    session: Session, candidate: Candidate, cells: Sequence[Cell]
) -> tuple[Candidate, tuple[Dropped, ...]]:
    """The candidate with the payloads worth keeping, and the dropped ones.

    Args:
        session: the session.
        candidate: a candidate that was timed.
        cells: cells in which it was timed, the deciding one first.
    """
    deciding = cells[0]
    dropped = []
    for count in dict.fromkeys(payload.num_threads for payload in candidate.payloads):
        if count is None:
            continue
        payloads = payloads_for_threads(candidate.payloads, count)
        at_count = [cell for cell in cells if cell.num_threads == count]
        nothing = None
        if count != deciding.num_threads:
            nothing = _gains_nothing(session, candidate.recipe, count, at_count)
        for payload in payloads:
            reason = nothing
            if reason is None and is_specialized(payload, payloads):
                reason = _no_faster(session, candidate.recipe, payload, at_count, deciding)
            if reason is not None:
                dropped.append(
                    Dropped(
                        payload=payload.path,
                        num_threads=count,
                        reason=reason,
                    )
                )
    return candidate.without(dropped), tuple(dropped)


def _gains_nothing(
    session: Session,
    recipe: str,
    count: int,
    cells: Sequence[Cell],
) -> str | None:
    """Why the payloads of a further thread count are dropped; None if the best of them is fast
    enough.
    """
    names = (recipe, general(recipe))
    entrants = [(cell, name) for cell in cells for name in names if name in cell.payloads]
    speeds = []
    for cell, name in entrants:
        faster = cell.faster(name, EAGER, len(entrants), session.policy)
        if faster:
            speeds.append((faster, cell))
    if not speeds:
        return f"with {place_text(count, {})} the machine was too disturbed to measure"
    best, cell = max(speeds, key=lambda speed: speed[0].low)
    if best.low > session.limits.speedup_min:
        return None
    return (
        f"at best ({cell}) {best} times as fast as eager, {best.least};"
        f" speedup_min is {session.limits.speedup_min:g}"
    )


def _no_faster(
    session: Session,
    recipe: str,
    payload: Payload,
    cells: Sequence[Cell],
    deciding: Cell,
) -> str | None:
    """Why the payload of a point is dropped; None if it decides, was not timed, or is faster than
    the payload for all sizes.
    """
    timed = [cell for cell in cells if cell.payloads.get(recipe) == payload.path]
    if not timed or timed[0] is deciding:  # not timed: stopped at the deciding point
        return None
    cell = timed[0]
    for_all = cell.payloads[general(recipe)]
    gain = cell.faster(recipe, general(recipe), 1, session.policy)
    if gain is None:
        return f"at {cell} the machine was too disturbed to measure; {for_all} serves"
    if gain.low > 1.0:
        return None
    return f"at {cell} {gain} times as fast as {for_all}, {gain.least}; {for_all} serves"
