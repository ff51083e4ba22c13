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

from freezer.artifact import Dropped, Payload, is_exact, slower_places
from freezer.errors import FreezeError, JudgeError
from freezer.files import link_or_copy, move
from freezer.freezing.candidates import EVIDENCE, Candidate, build
from freezer.freezing.drift import Gate, report
from freezer.freezing.judging import (
    CAPTURED,
    Cell,
    Judgement,
    Trial,
    figures_of,
    run_trial,
    time_sizes,
)
from freezer.freezing.models import Subject, to_device
from freezer.freezing.recipes import KEPT_EAGER
from freezer.freezing.target import Target
from freezer.hardware import PORTABLE
from freezer.runtime.devices import current
from freezer.runtime.torch_settings import plain_precision, threads
from freezer.spec import Dim

PAYLOAD = f"payloads/{CAPTURED}.pt2"

Sizes = Mapping[str, int]


def with_captured(
    subject: Subject, judgement: Judgement, target: Target, folder: Path
) -> Judgement:
    """Add the captured program to a winner that is slower than eager somewhere, for the sizes at
    which it is faster.

    Where it does not serve, the reason is in the outcome and among the dropped payloads.

    Args:
        subject, judgement, target: see `judge`. Without a winner or a slow place, the judgement is
            returned unchanged.
        folder: an existing empty folder for the payloads; it must exist until the artifact is
            written.
    """
    winner = judgement.winner
    if winner is None or target.device_class.name == PORTABLE:
        return judgement
    first = judgement.cells[0]
    slow = [
        item.point for item in slower_places(winner.points) if item.num_threads == first.num_threads
    ]
    slow = [
        point for point in slow if dict(point) != dict(first.point)
    ]  # the deciding payload always serves
    if not slow:
        return judgement
    try:
        captured = _build(subject, judgement, target, folder / CAPTURED)
        trial, cells = _try(to_device(subject, target.device), judgement, captured, target, slow)
    except FreezeError as error:
        dropped = Dropped(payload=PAYLOAD, num_threads=target.num_threads, reason=str(error))
        trial = replace(winner, dropped=(*winner.dropped, dropped))
        return judgement.with_winner(
            trial, text=f"the captured program does not serve instead: {error}"
        )
    others = [item.point for item in winner.points if item.num_threads == target.num_threads]
    dims = nearest_sizes(subject.spec.dims, [cell.point for cell in cells], others)
    trial = replace(trial, candidate=_in_one_folder(winner.candidate, captured, dims, folder))
    return _merged(subject, judgement, trial, cells, dims)


def _build(subject: Subject, judgement: Judgement, target: Target, folder: Path) -> Candidate:
    """Build the captured program, if it may serve beside the winner's payloads.

    Raises:
        FreezeError: it may not, or cannot be built.
    """
    assert judgement.winner is not None
    winner, limit = judgement.winner.candidate, judgement.limits.size_mb_max
    if winner.preserve or judgement.reference.stateful:
        raise JudgeError("state and preserved names belong to one payload")
    folder.mkdir()
    exported = replace(
        KEPT_EAGER, ways=tuple(way for way in KEPT_EAGER.ways if way[1] == "exported")
    )
    captured = _renamed(build(subject, exported, target, folder))
    size_mb = (winner.size_bytes + captured.size_bytes) / 1e6
    if limit is not None and size_mb > limit:
        raise JudgeError(f"{size_mb:.1f} MB with it; size_mb_max is {limit:g}")
    return captured


def _try(
    subject: Subject,
    judgement: Judgement,
    captured: Candidate,
    target: Target,
    slow: Sequence[Sizes],
) -> tuple[Trial, list[Cell]]:
    """Apply the drift gate to the captured program, and time it beside the winner; return the cells
    in which it is faster.

    Raises:
        JudgeError: it does not pass, or is nowhere faster.
    """
    assert judgement.winner is not None
    winner, policy = judgement.winner.candidate, judgement.policy
    gate = Gate(
        error_ratio_max=judgement.limits.error_ratio_max, float64=judgement.reference.float64
    )
    with threads(target.num_threads), plain_precision(target.device), current(target.device):
        trial = run_trial(subject, captured, target, judgement.reference, gate)
        if trial.problem is not None:
            raise JudgeError(trial.problem)
        cells = time_sizes(subject, [winner, captured], target.num_threads, policy, slow)
    speedups = [cell.faster(CAPTURED, winner.recipe, 1, policy) for cell in cells]
    gains = [cell for cell, found in zip(cells, speedups, strict=True) if found and found.low > 1]
    if not gains:
        least = [
            f"{cell} (at least {found.low:.2f} times)"
            for cell, found in zip(cells, speedups, strict=True)
            if found
        ]
        raise JudgeError(
            f"it is not faster with {'; '.join(least)}" if least else "it could not be timed"
        )
    return trial, gains


def _merged(
    subject: Subject, judgement: Judgement, trial: Trial, gains: Sequence[Cell], dims: Sequence[Dim]
) -> Judgement:
    """The judgement with the captured program among the winner's payloads.

    Args:
        trial: of the captured program, with the merged candidate.
        gains: cells in which it is faster than the winner.
        dims: the sizes that it serves.
    """
    winner, candidate = judgement.winner, trial.candidate
    assert winner is not None
    assert winner.drift is not None, "a winner has passed the drift gate"
    assert trial.drift is not None
    gains = [cell for cell in gains if _within(cell.point, dims)]
    kept = [item for item in winner.points if item.place not in map(str, gains)]
    text = f"the captured program serves {', '.join(map(_text, dims))}"
    gone = [
        payload for payload in winner.candidate.payloads if payload.path not in candidate.reports
    ]
    answers = zip(subject.sets, winner.answers, trial.answers, strict=True)
    gate = Gate(
        error_ratio_max=judgement.limits.error_ratio_max, float64=judgement.reference.float64
    )
    changed = replace(
        winner,
        candidate=candidate,
        drift=report([*winner.drift.rows, *trial.drift.rows], gate),
        answers=[captured if _within(item.point, dims) else own for item, own, captured in answers],
        points=(*kept, *figures_of(candidate, gains, judgement.policy, 1)),
        dropped=(
            *winner.dropped,
            *(Dropped(payload=p.path, num_threads=p.num_threads or 0, reason=text) for p in gone),
        ),
    )
    cells = {str(cell): cell for cell in (*judgement.cells, *gains)}
    return replace(judgement, cells=tuple(cells.values())).with_winner(changed, text=text)


def _text(dim: Dim) -> str:
    return f"{dim.name} {dim.min}" if dim.min == dim.max else str(dim)


def nearest_sizes(
    dims: Sequence[Dim], gains: Sequence[Sizes], timed: Sequence[Sizes]
) -> tuple[Dim, ...]:
    """The sizes of every dim that are nearer to these points than to any other timed one, by ratio.

    If other timed points are among them, those of the last of the points alone.
    """
    others = [point for point in timed if dict(point) not in [dict(gain) for gain in gains]]
    found = tuple(
        _nearest(dim, [point[dim.name] for point in gains], [point[dim.name] for point in others])
        for dim in dims
    )
    if len(gains) > 1 and any(_within(point, found) for point in others):
        return nearest_sizes(dims, gains[-1:], timed)
    return found


def _nearest(dim: Dim, own: Sequence[int], others: Sequence[int]) -> Dim:
    below, above = (
        [size for size in others if size < min(own)],
        [size for size in others if size > max(own)],
    )
    low = math.isqrt(max(below) * min(own)) + 1 if below else dim.min
    high = math.isqrt(max(own) * min(above)) if above else dim.max
    low, high = (
        -(-low // dim.multiple_of) * dim.multiple_of,
        high // dim.multiple_of * dim.multiple_of,
    )
    return replace(dim, min=min(low, *own), max=max(high, *own))


def _within(point: Sizes, dims: Sequence[Dim]) -> bool:
    return all(point[dim.name] in dim.sizes for dim in dims)


def _in_one_folder(
    winner: Candidate, captured: Candidate, dims: tuple[Dim, ...], folder: Path
) -> Candidate:
    """The winner with the captured program as one more payload, in a folder of their own."""
    payloads = _in_order(winner.payloads, replace(captured.payloads[0], dims=dims))
    for payload in payloads:
        link_or_copy(
            (captured if payload.path == PAYLOAD else winner).folder / payload.path,
            folder / payload.path,
        )
    for text in (
        *(winner.folder / EVIDENCE).glob("*"),
        *(captured.folder / EVIDENCE).glob(f"{CAPTURED}-*"),
    ):
        link_or_copy(text, folder / EVIDENCE / text.name)
    return replace(
        winner,
        folder=folder,
        payloads=payloads,
        reports={
            payload.path: {**winner.reports, **captured.reports}[payload.path]
            for payload in payloads
        },
        build_s=winner.build_s + captured.build_s,
    )


def _renamed(captured: Candidate) -> Candidate:
    """The candidate with its payload as `PAYLOAD`, and with its texts as the captured and the
    frozen ones: they are the same.
    """
    (own,) = captured.payloads
    move(captured.folder / own.path, captured.folder / PAYLOAD)
    for text in list((captured.folder / EVIDENCE).glob("all-captured-*")):
        for name in (CAPTURED, f"{CAPTURED}-captured"):
            link_or_copy(text, text.with_name(f"{name}-{text.name.removeprefix('all-captured-')}"))
    return replace(
        captured,
        payloads=(replace(own, path=PAYLOAD),),
        reports={PAYLOAD: captured.reports[own.path]},
    )


def _in_order(payloads: Sequence[Payload], added: Payload) -> tuple[Payload, ...]:
    """Payloads for single sizes, without those that the added one replaces, then it, then those for
    all sizes.
    """
    exact = [payload for payload in payloads if is_exact(payload)]
    single = [
        payload
        for payload in exact
        if not added.accepts({dim.name: dim.min for dim in payload.dims})
    ]
    return (*single, added, *(payload for payload in payloads if payload not in exact))
