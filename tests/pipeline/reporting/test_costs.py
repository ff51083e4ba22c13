"""Costs of a million inferences by device class, and the cheapest class."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from freezer.artifact import Measured, MeasuredLatency, PreviousRecord
from freezer.spec import Limits, SamplingPolicy
from pipeline.planning import Item
from pipeline.planning.keys import make_key
from pipeline.records import CandidateReport, Outcome
from pipeline.reporting import class_costs
from tests.support.campaigns import entry
from tests.support.past_campaigns import past_point

PRICES = {"cpu-x86-64-v4": 0.36, "cpu-x86-64-v3": 0.18, "cuda-sm90": 3.6}


def reached(
    folder: Path,
    device_class: str,
    p50_ms: float,
    *,
    verdict: str = "published",
    batch: int | None = None,
    **changes: Any,
) -> tuple[Item, Outcome]:
    """An item with prices, and its outcome; eager takes twice as long.

    `changes` are of the entry.
    """
    point = {} if batch is None else {"batch": batch}
    item = Item(
        entry=replace(entry("m", folder), price_per_hour=PRICES, **changes),
        device_class=device_class,
        num_threads=2,
        source=make_key({}),
        builds={},
        judge=make_key({}),
        policy=SamplingPolicy(),
    )
    outcome = Outcome(
        model="m",
        device_class=device_class,
        verdict=verdict,
        reason=None,
        num_threads=2,
        source="",
        source_key="",
        judge_key="",
        recipe="r",
        figures=Measured(latency_ms=MeasuredLatency(p50=p50_ms, eager_p50=2 * p50_ms)),
        candidates=(CandidateReport(recipe="r", build_key="", points=(past_point(point),)),),
    )
    return item, outcome


def costs(*found: tuple[Item, Outcome]) -> dict[str, tuple[float, bool, bool]]:
    """Cost, whether limits are met, and whether it is the cheapest, by class."""
    items, outcomes = zip(*found, strict=True)
    return {
        cost.device_class: (round(cost.cost_per_million, 9), cost.meets_limits, cost.cheapest)
        for cost in class_costs(items, outcomes)
    }


def test_cost_is_price_times_median_of_one_inference(tmp_path: Path) -> None:
    """0.36 an hour are 100 per million seconds; at 10 ms, 1 per million calls."""
    found = costs(
        reached(tmp_path, "cpu-x86-64-v4", 10.0), reached(tmp_path, "cpu-x86-64-v3", 30.0)
    )
    assert found == {"cpu-x86-64-v4": (1.0, True, True), "cpu-x86-64-v3": (1.5, True, False)}
    assert costs(reached(tmp_path, "cpu-x86-64-v4", 10.0, batch=8)) == {
        "cpu-x86-64-v4": (0.125, True, True)
    }


def test_class_without_a_price_or_artifact_has_no_cost(tmp_path: Path) -> None:
    free, failed = (
        reached(tmp_path, "portable", 1.0),
        reached(tmp_path, "cpu-x86-64-v4", 1.0, verdict="unstable"),
    )
    assert costs(free, failed) == {}


def test_previous_artifact_costs_what_it_was_measured_at(tmp_path: Path) -> None:
    item, outcome = reached(tmp_path, "cpu-x86-64-v4", 10.0, verdict="kept-previous")
    previous = PreviousRecord(
        version=1,
        artifact="sha256:1",
        recipe="r",
        torch="2.13",
        same_weights=True,
        speedup=0.5,
        p50_ms=5.0,
    )
    assert costs((item, replace(outcome, previous=previous))) == {
        "cpu-x86-64-v4": (0.5, True, True)
    }


def test_eager_may_be_cheapest_within_the_limits(tmp_path: Path) -> None:
    gpu, cpu = (tmp_path, "cuda-sm90", 2.0), (tmp_path, "cpu-x86-64-v4", 5.0)
    assert costs(reached(*gpu), reached(*cpu, verdict="kept-eager")) == {
        "cuda-sm90": (2.0, True, False),
        "cpu-x86-64-v4": (1.0, True, True),
    }
    for limits, meets in (
        (Limits(latency_ms_max=10.0), True),
        (Limits(latency_ms_max=9.0), False),
        (Limits(size_mb_max=1), False),
    ):
        found = costs(
            reached(*gpu, limits=limits), reached(*cpu, verdict="kept-eager", limits=limits)
        )
        assert found == {
            "cuda-sm90": (2.0, True, not meets),
            "cpu-x86-64-v4": (1.0, meets, meets),
        }, limits
