"""Cells: sharing the time limit, and selecting the payloads worth keeping."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from freezer.artifact import Dropped, Payload
from freezer.freezing.candidates import Candidate
from freezer.freezing.judging import Cell, kept_payloads, point_figures
from freezer.freezing.judging.judgement import general
from freezer.freezing.recipes import EAGER
from freezer.spec import Dim, Limits
from freezer.timing import Sampling
from tests.support.steps import plain_candidate, plain_payload, rules

POLICY = rules().policy
RECIPE = "inductor-frozen"


def payload(num_threads: int, batch: int | None) -> Payload:
    dims = (Dim(name="batch", min=batch or 1, max=batch or 8),)
    path = f"payloads/{f'batch{batch}' if batch else 'all'}-threads{num_threads}.pt2"
    return plain_payload("inductor", num_threads, path=path, dims=dims)


ALL = plain_candidate(*(payload(count, batch) for count in (2, 1) for batch in (1, 8, None)))
"""Payloads for 2 threads, which decide, and 1; for batch 1, which decides, batch 8, and all."""


def cell(
    num_threads: int,
    batch: int,
    *,
    eager: float,
    special: float,
    dynamic: float,
    stable: bool = True,
) -> Cell:
    """Twenty rounds of these latencies in milliseconds, with a little noise that is the same for
    all.
    """
    times: Mapping[str, float] = {EAGER: eager, RECIPE: special, general(RECIPE): dynamic}
    samples = {
        name: [[ms * (1 + 0.01 * (i % 5)) for _ in range(4)] for i in range(20)]
        for name, ms in times.items()
    }
    return Cell(
        num_threads=num_threads,
        point={"batch": batch},
        sampling=Sampling(samples_ms=samples, num_dropped=0, settled=True, stable=stable),
        payloads={
            RECIPE: payload(num_threads, batch).path,
            general(RECIPE): payload(num_threads, None).path,
        },
    )


def cells(**changes: Cell) -> tuple[Cell, ...]:
    """The four cells, where every payload gains; some replaced."""
    gains = {
        "two_one": cell(2, 1, eager=10, special=4, dynamic=6),
        "two_eight": cell(2, 8, eager=80, special=30, dynamic=40),
        "one_one": cell(1, 1, eager=18, special=7, dynamic=9),
        "one_eight": cell(1, 8, eager=150, special=60, dynamic=70),
    }
    return tuple({**gains, **changes}.values())


def kept(cells: tuple[Cell, ...], **changes: Any) -> tuple[Candidate, tuple[Dropped, ...]]:
    return kept_payloads(rules(**changes), ALL, cells)


def names(candidate: Candidate) -> list[str]:
    return [Path(item.path).stem for item in candidate.payloads]


def test_point_payload_must_beat_the_general_one() -> None:
    slow = cells(
        two_eight=cell(2, 8, eager=80, special=40, dynamic=40),
        one_one=cell(1, 1, eager=18, special=9.5, dynamic=9),
    )
    found, dropped = kept(slow)
    assert names(found) == ["batch1-threads2", "all-threads2", "batch8-threads1", "all-threads1"]
    assert set(found.reports) == {item.path for item in found.payloads}
    assert all("; payloads/all-threads" in item.reason for item in dropped)
    assert len(dropped) == 2


@pytest.mark.parametrize(
    "changes",
    [{}, {"two_one": cell(2, 1, eager=10, special=6, dynamic=4)}],
    ids=["all gain", "deciding"],
)
def test_payloads_that_gain_or_decide_are_kept(changes: dict[str, Cell]) -> None:
    assert kept(cells(**changes)) == (ALL, ())


def test_further_thread_count_must_beat_eager() -> None:
    eager_is_as_fast = {
        "one_one": cell(1, 1, eager=7, special=7, dynamic=9),
        "one_eight": cell(1, 8, eager=60, special=60, dynamic=70),
    }
    found, dropped = kept(cells(**eager_is_as_fast))
    assert names(found) == ["batch1-threads2", "batch8-threads2", "all-threads2"]
    assert {"speedup_min is 1.05" in item.reason for item in dropped} == {True}
    one_point = {**eager_is_as_fast, "one_eight": cell(1, 8, eager=150, special=60, dynamic=70)}
    assert kept(cells(**one_point)) == (ALL, ())
    found, dropped = kept(cells(**one_point), limits=Limits(speedup_min=4.0))
    assert [item.num_threads for item in dropped] == [1, 1, 1]


def test_disturbed_cells_drop_their_payloads() -> None:
    torn = cells(two_eight=cell(2, 8, eager=80, special=30, dynamic=40, stable=False))
    found, dropped = kept(torn)
    assert names(found) == [
        "batch1-threads2",
        "all-threads2",
        "batch1-threads1",
        "batch8-threads1",
        "all-threads1",
    ]
    assert "disturbed" in dropped[0].reason
    quiet = {"eager": 1.0, "special": 1.0, "dynamic": 1.0, "stable": False}
    none = cells(one_one=cell(1, 1, **quiet), one_eight=cell(1, 8, **quiet))  # type: ignore[arg-type]
    assert {"disturbed" in item.reason for item in kept(none)[1]} == {True}


def test_figures_of_kept_payloads() -> None:
    found, _ = kept(cells(two_eight=cell(2, 8, eager=80, special=40, dynamic=40)))
    rows = list(point_figures(found, cells(), POLICY, 1))
    assert [Path(row.payload).stem for row in rows] == [
        *("batch1-threads2", "all-threads2", "all-threads2"),
        *("batch1-threads1", "all-threads1", "batch8-threads1", "all-threads1"),
    ]
    assert (rows[2].num_threads, rows[2].point) == (2, {"batch": 8})
    figures = (rows[0].eager_p50, rows[0].p50, rows[0].speedup)
    assert figures == pytest.approx((10.2, 4.08, 2.5))
    torn = [cell(2, 1, eager=10, special=4, dynamic=6, stable=False)]
    speeds = [cell(2, 1, eager=10, special=ms, dynamic=10) for ms in (9, 11)]
    verdicts = [item.verdict for item in point_figures(ALL, [*torn, *speeds], POLICY, 1)]
    assert verdicts == [*["unstable"] * 2, "faster", "not slower", "slower", "not slower"]
