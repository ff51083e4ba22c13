"""Verdicts: what the objective ranks, what the limits exclude, and the Pareto front."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from freezer.artifact import PointFigures
from freezer.freezing.judging import Judgement
from freezer.freezing.judging.verdicts import decide, pareto, refuse_contradicted
from freezer.spec import Clock, Limits, Objective
from freezer.timing import Speedup
from tests.support.judgements import judgement, trial
from tests.support.steps import rules

FAST = trial("fast", speedup=3.0, size_mb=40, load_ms=900, memory_mb=214)
SMALL = trial("small", speedup=1.5, size_mb=20, load_ms=300, memory_mb=120)
ALMOST = trial("almost as small", speedup=1.4, size_mb=19.5, load_ms=310, memory_mb=118)
SLOW = trial("slow", speedup=0.9, size_mb=10, load_ms=50, memory_mb=60)
WRONG = trial("wrong", speedup=9.0, size_mb=1, load_ms=1, memory_mb=1, problem="error_ratio 9")
TRIALS = (FAST, SMALL, ALMOST, SLOW, WRONG)


@pytest.mark.parametrize(
    ("objective", "limits", "winner", "reason"),
    [
        ("p50", {}, "fast", "fast is 3.00 times as fast as eager (at least 2.85)"),
        ("p95", {}, "fast", "fast is 3.00 times as fast as eager by p95 (at least 2.85)"),
        ("throughput", {}, "fast", "fast is 3.00 times as fast as eager in throughput"),
        ("size", {}, "small", "small: 20.0 MB, the least of those within the limits; 1.50 times"),
        ("size", {"speedup_min": 0.5}, "slow", "slow: 10.0 MB"),
        ("p50", {"memory_mb_max": 200}, "small", ""),
        ("p50", {"memory_mb_max": 119}, "almost as small", ""),
        ("p50", {"size_mb_max": 30}, "small", ""),
        ("p50", {"latency_ms_max": 3.9}, "fast", ""),
        ("p50", {"memory_mb_max": 100}, None, "fast: 214.0 MB of memory; memory_mb_max is 100"),
        ("p50", {"size_mb_max": 5}, None, "fast: 40.0 MB; size_mb_max is 5"),
        ("p50", {"speedup_min": 9}, None, "fast: speedup 3.00, at least 2.85; speedup_min is 9"),
        ("p50", {"latency_ms_max": 1}, None, "fast: median 3.33"),
        ("p95", {"latency_ms_max": 3.9}, None, "fast: p95 4.0 ms; latency_ms_max is 3.9"),
    ],
)
def test_limits_exclude_and_the_objective_ranks(
    objective: Objective, limits: dict[str, Any], winner: str | None, reason: str
) -> None:
    """`slow` needs least of everything, but is slower than eager; the smallest is hardly smaller
    than a faster one.
    """
    session = rules(objective=objective, limits=Limits(**limits))
    decided = decide(session, judgement(*TRIALS))
    assert decided.verdict == ("published" if winner else "kept-eager")
    assert (decided.winner.recipe if decided.winner else None) == winner
    assert decided.reason.startswith(reason)


def test_pareto_front_has_no_dominated_candidate() -> None:
    front = pareto(judgement(*TRIALS))
    assert [point.recipe for point in front] == ["fast", "small", "almost as small", "slow"]
    worse = trial("worse", speedup=1.3, size_mb=20, load_ms=310, memory_mb=120)
    assert pareto(judgement(*TRIALS, worse)) == front
    assert (front[1].size_mb, front[1].load_ms, front[1].memory_mb) == (20, 300, 120)
    assert front[1].items_per_s == pytest.approx(400), "batches of 4 in 10 ms"


def disturbed(*points: tuple[int, float, Clock]) -> Judgement:
    """A judgement by disturbed rounds, with the winner's thread counts, speedups and clocks."""
    figures = [
        PointFigures(
            num_threads=num_threads,
            point={},
            payload="payloads/all.pt2",
            eager_p50=None,
            speedup=speedup,
            speedup_ci=None,
            clock=clock,
        )
        for num_threads, speedup, clock in points
    ]
    noisy = Speedup(value=3.0, low=2.85, high=3.15, clock="disturbed")
    timed = judgement(replace(FAST, points=tuple(figures), speedup=noisy))
    sampling = replace(timed.cells[0].sampling, clock=points[0][2], disturbance="others used 77%")
    timed = replace(timed, cells=(replace(timed.cells[0], sampling=sampling),))
    return refuse_contradicted(rules(), decide(rules(), timed))


@pytest.mark.parametrize(
    ("points", "verdict"),
    [
        ([(2, 512.29, "disturbed"), (1, 1.9, "cpu")], "unstable"),
        ([(2, 512.29, "disturbed"), (2, 1.9, "disturbed")], "unstable"),
        ([(2, 4.2, "disturbed"), (1, 1.9, "cpu")], "published"),
        ([(16, 20.0, "disturbed"), (1, 1.9, "cpu")], "published"),
        ([(2, 512.29, "disturbed")], "published"),
        ([(2, 512.29, "wall"), (1, 1.9, "wall")], "published"),
    ],
)
def test_contradicted_figures_of_disturbed_rounds_are_refused(
    points: list[tuple[int, float, Clock]], verdict: str
) -> None:
    decided = disturbed(*points)
    assert decided.verdict == verdict
    assert (decided.winner is None) == (verdict == "unstable")
    if verdict == "unstable":
        assert "~512.29" in decided.reason
        assert "1.90" in decided.reason
