"""Comparison of the winners of `auto` and `all`."""

from __future__ import annotations

from benchmarks.search import pairs_of, summary
from freezer.artifact import Measured
from pipeline.records import CandidateReport, Outcome


def outcome(
    model: str,
    recipe: str,
    speeds: dict[str, float],
    *,
    verdict: str = "published",
    build_s: float = 10.0,
) -> Outcome:
    figures = {
        name: Measured(speedup=value, speedup_ci=(value - 0.1, value + 0.1))
        for name, value in speeds.items()
    }
    return Outcome(
        model=model,
        device_class="cpu-x86-64-v4",
        verdict=verdict,
        reason=None,
        num_threads=2,
        source="s",
        source_key="",
        judge_key="",
        recipe=recipe,
        figures=figures[recipe],
        build_s=build_s,
        candidates=tuple(
            CandidateReport(recipe=name, build_key="", figures=own) for name, own in figures.items()
        ),
    )


def test_winners_are_compared() -> None:
    every = {"slow": 1.2, "close": 1.95, "best": 2.0}
    complete = [
        outcome(name, "best", every, build_s=40.0)
        for name in ("same", "tied", "missed", "only here")
    ]
    complete.append(outcome("eager", "slow", {"slow": 0.9}, verdict="kept-eager", build_s=40.0))
    searched = [outcome("same", "best", {"best": 2.1}), outcome("tied", "close", {"close": 2.1})]
    searched += [
        outcome("missed", "slow", {"slow": 1.2}),
        outcome("eager", "slow", {"slow": 0.9}, verdict="kept-eager"),
    ]
    pairs = pairs_of(complete, searched)
    assert [(pair.all.model, pair.found) for pair in pairs] == [
        ("same", True),
        ("tied", True),
        ("missed", False),
        ("eager", True),
    ]
    last = (
        "`auto` found the winner for 3 of 4 models, in 40 s of 160 s (median share 0.25); 0 recipes"
        " skipped."
    )
    assert summary(pairs)[-1] == last
