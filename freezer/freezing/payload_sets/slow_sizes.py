"""Slow sizes: where the winner is slower than eager, the captured program serves if it is faster
there.

The captured program is not frozen, so it is about as fast as eager. It is built only for a winner
that is slower somewhere, passes the same drift gate, and is timed beside the winner at those
places. Its payload accepts the sizes that are nearer, in every dim and by ratio, to a place where
it gains than to any other timed place; the winner's payloads serve all others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from freezer.artifact import Dropped, is_exact, slower_places
from freezer.errors import FreezeError, JudgeError
from freezer.freezing.candidates import Candidate, build
from freezer.freezing.drift import report
from freezer.freezing.judging import (
    CAPTURED,
    Cell,
    Judgement,
    Session,
    Trial,
    point_figures,
    run_trial,
    time_sizes,
)
from freezer.freezing.recipes import KEPT_EAGER
from freezer.freezing.target import working_conditions
from freezer.hardware import PORTABLE
from freezer.spec import Dim, Point

PAYLOAD = f"payloads/{CAPTURED}.pt2"


def with_captured(session: Session, judgement: Judgement, folder: Path) -> Judgement:
    """Add the captured program to a winner that is slower than eager somewhere, for the sizes at
    which it is faster.

    Where it does not serve, the reason is in the outcome and among the dropped payloads.

    Args:
        session: the session of the judgement.
        judgement: the judgement; without a winner or a slow place it is returned unchanged.
        folder: an existing empty folder for the payloads; it must exist until the artifact is
            written.
    """
    winner = judgement.winner
    if winner is None or not judgement.cells or session.target.device_class.name == PORTABLE:
        return judgement
    slow = _slow_sizes(judgement, winner)
    if not slow:
        return judgement
    try:
        captured = _build(session, winner, folder / CAPTURED)
        trial, gains = _try(session, winner, captured, slow)
    except FreezeError as error:
        dropped = Dropped(
            payload=PAYLOAD,
            num_threads=session.num_threads,
            reason=str(error),
        )
        text = f"the captured program does not serve instead: {error}"
        return judgement.with_winner(winner.without_payloads([dropped]), text=text)
    timed = [
        figures.point for figures in winner.points if figures.num_threads == session.num_threads
    ]
    dims = nearest_sizes(session.subject.spec.dims, [cell.point for cell in gains], timed)
    candidate = _in_one_folder(winner.candidate, captured, dims, folder)
    served = {str(cell): cell for cell in gains if _within(cell.point, dims)}
    merged = _merged(session, winner, replace(trial, candidate=candidate), served, dims)
    others = [cell for cell in judgement.cells if str(cell) not in served]
    judgement = replace(judgement, cells=[*others, *served.values()])
    return judgement.with_winner(merged, text=_serves(dims))


def _slow_sizes(judgement: Judgement, winner: Trial) -> list[Point]:
    """The sizes at which the winner is slower than eager, without the deciding ones, at which its
    payload always serves.
    """
    deciding = judgement.cells[0]
    return [
        figures.point
        for figures in slower_places(winner.points)
        if figures.num_threads == deciding.num_threads and figures.point != deciding.point
    ]


def _build(
    session: Session,
    winner: Trial,
    folder: Path,
) -> Candidate:
    """Build the captured program, if it may serve beside the winner's payloads.

    Raises:
        FreezeError: it may not, or cannot be built.
    """
    limit = session.limits.size_mb_max
    if winner.candidate.preserve or session.reference.stateful:
        raise JudgeError("state and preserved names belong to one payload")
    folder.mkdir()
    ways = tuple(way for way in KEPT_EAGER.ways if way[1] == "exported")
    captured = build(session.subject, replace(KEPT_EAGER, ways=ways), session.target, folder)
    size_mb = (winner.candidate.size_bytes + captured.size_bytes) / 1e6
    if limit is not None and size_mb > limit:
        raise JudgeError(f"{size_mb:.1f} MB with it; size_mb_max is {limit:g}")
    return captured


def _try(
    session: Session,
    winner: Trial,
    captured: Candidate,
    slow: Sequence[Point],
) -> tuple[Trial, list[Cell]]:
    """Apply the drift gate to the captured program, and time it beside the winner; return the cells
    in which it is faster.

    Raises:
        JudgeError: it does not pass, or is nowhere faster.
    """
    with working_conditions(session.target):
        trial = run_trial(session, captured)
        if trial.problem is not None:
            raise JudgeError(trial.problem)
        cells = time_sizes(session, [winner.candidate, captured], slow)
    gains = []
    for cell in cells:
        faster = cell.faster(CAPTURED, winner.recipe, 1, session.policy)
        if faster is not None and faster.low > 1:
            gains.append(cell)
    if not gains:
        raise JudgeError("it is not faster there")
    return trial, gains


def _merged(
    session: Session,
    winner: Trial,
    captured: Trial,
    served: Mapping[str, Cell],
    dims: Sequence[Dim],
) -> Trial:
    """The winner with the captured program among its payloads.

    Args:
        session: the session of the judgement.
        winner: the winner of the judgement.
        captured: trial of the captured program, with the merged candidate.
        served: cells in which it serves, by place.
        dims: sizes that it serves.
    """
    points = [figures for figures in winner.points if figures.place not in served]
    points += point_figures(captured.candidate, list(served.values()), session.policy, 1)
    replaced = [
        Dropped(
            payload=payload.path,
            num_threads=payload.num_threads or 0,
            reason=_serves(dims),
        )
        for payload in winner.candidate.payloads
        if payload not in captured.candidate.payloads
    ]
    merged = replace(
        winner,
        candidate=captured.candidate,
        drift=report([*winner.drift.rows, *captured.drift.rows], session.gate),
        points=tuple(points),
    )
    return merged.without_payloads(replaced)


def _serves(dims: Sequence[Dim]) -> str:
    sizes = [str(dim) if dim.varies else f"{dim.name} {dim.min}" for dim in dims]
    return f"the captured program serves {', '.join(sizes)}"


def nearest_sizes(
    dims: Sequence[Dim],
    gains: Sequence[Point],
    timed: Sequence[Point],
) -> tuple[Dim, ...]:
    """The sizes of every dim that are nearer to these points than to any other timed one, by ratio.

    If other timed points are among them, those of the last of the points alone.
    """
    others = [point for point in timed if point not in gains]
    nearest = tuple(_nearest(dim, gains, others) for dim in dims)
    if len(gains) > 1 and any(_within(point, nearest) for point in others):
        return nearest_sizes(dims, gains[-1:], timed)
    return nearest


def _nearest(
    dim: Dim,
    gains: Sequence[Point],
    others: Sequence[Point],
) -> Dim:
    """The dim with the bounds halfway, by ratio, to the next sizes of `others`."""
    sizes = [point[dim.name] for point in gains]
    other_sizes = [point[dim.name] for point in others]
    smallest, largest, step = min(sizes), max(sizes), dim.multiple_of
    low = max((size for size in other_sizes if size < smallest), default=0)
    high = min((size for size in other_sizes if size > largest), default=0)
    least = math.isqrt(low * smallest) + 1 if low else dim.min
    most = math.isqrt(largest * high) if high else dim.max
    least, most = -(-least // step) * step, most // step * step
    return replace(dim, min=min(least, smallest), max=max(most, largest))


def _within(point: Point, dims: Sequence[Dim]) -> bool:
    return all(point[dim.name] in dim.sizes for dim in dims)


def _in_one_folder(
    winner: Candidate,
    captured: Candidate,
    dims: tuple[Dim, ...],
    folder: Path,
) -> Candidate:
    """The winner with the captured program as one more payload, in a folder of their own.

    First the payloads for single sizes, without those that it replaces, then it, then those for all
    sizes.
    """
    added = replace(captured.payloads[0], dims=dims)
    single, rest = [], []
    for payload in winner.payloads:
        if not is_exact(payload):
            rest.append(payload)
        elif not added.accepts(payload.first_point):
            single.append(payload)
    payloads = (*single, added, *rest)
    for origin in (winner, captured):
        origin.link_files(folder)
    reports = {**winner.reports, **captured.reports}
    return replace(
        winner,
        folder=folder,
        payloads=payloads,
        reports={payload.path: reports[payload.path] for payload in payloads},
        build_s=winner.build_s + captured.build_s,
    )
