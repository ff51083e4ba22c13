"""Verdicts: what the objective ranks, what the limits exclude, and the Pareto front."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freezer.artifact import ColdStart, Payload
from freezer.freezing.candidates import Candidate
from freezer.freezing.judging import Cell, Trial
from freezer.freezing.judging.verdicts import conversion, decide, pareto
from freezer.freezing.recipes import EAGER
from freezer.spec import Limits, Objective
from freezer.timing import Sampling, Speedup
from tests.support.steps import QUICK


def trial(
    recipe: str,
    *,
    speedup: float,
    size_mb: float,
    load_ms: float,
    memory_mb: float,
    problem: str | None = None,
) -> Trial:
    """A timed trial; the interval of its speedup is 5% to each side."""
    payload = Payload(
        path="payloads/all.pt2",
        digest="",
        size_bytes=int(size_mb * 1e6),
        kind="exported",
        num_threads=1,
        dims=(),
    )
    candidate = Candidate(
        folder=Path(),
        recipe=recipe,
        lowering="",
        capture="export",
        settings={},
        tried=(),
        payloads=(payload,),
        reports={},
        warnings=(),
        toolchain={},
        weights="",
        build_s=0.0,
    )
    cold = ColdStart(
        import_torch_ms=1e3,
        open_ms=load_ms / 2,
        first_call_ms=load_ms / 2,
        second_call_ms=1.0,
        memory_before_mb=200.0,
        memory_peak_mb=200.0 + memory_mb,
    )
    faster = Speedup(value=speedup, low=speedup * 0.95, high=speedup * 1.05)
    latency_ms = {"p50": 10 / speedup, "p95": 12 / speedup}
    return Trial(
        candidate=candidate,
        drift=None,
        problem=problem,
        latency_ms=latency_ms,
        speedup=faster,
        cold_start=cold,
    )


FAST = trial("fast", speedup=3.0, size_mb=40, load_ms=900, memory_mb=214)
SMALL = trial("small", speedup=1.5, size_mb=20, load_ms=300, memory_mb=120)
ALMOST = trial("almost as small", speedup=1.4, size_mb=19.5, load_ms=310, memory_mb=118)
SLOW = trial("slow", speedup=0.9, size_mb=10, load_ms=50, memory_mb=60)
WRONG = trial("wrong", speedup=9.0, size_mb=1, load_ms=1, memory_mb=1, problem="error_ratio 9")
TRIALS = (FAST, SMALL, ALMOST, SLOW, WRONG)

CELL = Cell(
    num_threads=1,
    point={"batch": 4},
    sampling=Sampling(
        samples_ms={
            name: [[10.0] * 20] * 20 for name in (EAGER, *(one.candidate.recipe for one in TRIALS))
        },
        num_dropped=0,
        settled=True,
        stable=True,
    ),
    payloads={},
)


def winner(objective: Objective, **limits: Any) -> tuple[str, str, str]:
    """Verdict, recipe and reason."""
    verdict, reason, best = decide(
        TRIALS, (CELL,), Limits(**limits), objective, on_drift_alone=False
    )
    return verdict, best.candidate.recipe, reason


@pytest.mark.parametrize(
    ("objective", "recipe", "reason"),
    [
        ("p50", "fast", "fast is 3.00 times as fast as eager (at least 2.85)"),
        ("p95", "fast", "fast is 3.00 times as fast as eager by p95 (at least 2.85)"),
        ("throughput", "fast", "fast is 3.00 times as fast as eager in throughput (at least 2.85)"),
        ("size", "small", "small: 20.0 MB, the least"),
    ],
)
def test_objective_selects_among_those_within_the_limits(
    objective: Objective, recipe: str, reason: str
) -> None:
    """`slow` needs least of everything, but is slower than eager; the smallest is hardly smaller
    than a faster one.
    """
    verdict, found, why = winner(objective)
    assert (verdict, found) == ("published", recipe)
    assert why.startswith(reason)


def test_slower_than_eager_wins_where_the_limit_allows_it() -> None:
    assert winner("size", speedup_min=0.5)[:2] == ("published", "slow")


def test_limits_exclude_the_best() -> None:
    assert winner("p50", memory_mb_max=200)[1] == "small"
    assert winner("p50", size_mb_max=30)[1] == "small"
    assert winner("p50", memory_mb_max=119)[1] == "almost as small"


def test_reason_names_limit_and_figure() -> None:
    verdict, recipe, reason = winner("p50", memory_mb_max=100)
    assert (verdict, recipe) == ("kept-eager", "fast")
    assert reason == "fast: 214.0 MB of memory; memory_mb_max is 100"
    assert winner("p95", latency_ms_max=3.9)[2] == "fast: p95 4.0 ms; latency_ms_max is 3.9"
    assert winner("p50", latency_ms_max=3.9)[0] == "published", "the median is 3.3 ms"


def test_pareto_front_has_no_dominated_candidate() -> None:
    front = pareto(TRIALS, (CELL,))
    assert [one.recipe for one in front] == ["fast", "small", "almost as small", "slow"]
    worse = trial("worse", speedup=1.3, size_mb=20, load_ms=310, memory_mb=120)
    assert pareto((*TRIALS, worse), (CELL,)) == front
    assert front[1].size_mb == 20
    assert (front[1].load_ms, front[1].memory_mb) == (300, 120)
    assert front[1].items_per_s == pytest.approx(400), "batches of 4 in 10 ms"


def test_gain_of_a_conversion_is_over_the_fastest_torchscript() -> None:
    legacy = [replaced(one, lowering="torchscript") for one in (FAST, SMALL)]
    samples_ms = {"fast": [[4.0] * 9] * 9, "small": [[2.0] * 9] * 9, "slow": [[1.0] * 9] * 9}
    cell = replace(CELL, sampling=replace(CELL.sampling, samples_ms=samples_ms))
    converted = replaced(SLOW, capture="convert")
    assert "slow, converted to torch.export, is 2.00 times (2.00-2.00) as fast as small" in (
        conversion([*legacy, converted], (cell,), QUICK)
    )
    refused = replace(converted, problem="error_ratio 9")
    assert "does not pass the drift gate" in conversion([*legacy, refused], (), QUICK)
    assert conversion(TRIALS, (CELL,), QUICK) == ""


def replaced(one: Trial, **changes: Any) -> Trial:
    return replace(one, candidate=replace(one.candidate, **changes))
