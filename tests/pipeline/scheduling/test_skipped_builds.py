"""Builds are skipped if earlier judgements of the architecture rule them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from freezer.artifact import Measured
from freezer.store import Store
from pipeline.cluster import Done
from pipeline.ledger import Ledger
from pipeline.planning import Plan
from pipeline.records import SKIPPED, CandidateReport, Failure, Outcome
from pipeline.worker import BuildResult, JudgeResult
from tests.support import campaigns
from tests.support.executions import Fake, executed, explained, record
from tests.support.steps import HERE

CHEAP, SLOW, FAST = RECIPES = ("torchscript-frozen", "torchscript-exact", "inductor-frozen")


def plan_of(
    name: str,
    store: Store,
    ledger: Ledger,
    *,
    optional: Sequence[str] = RECIPES,
) -> Plan:
    """Of one model for this machine's class, by three recipes that `auto` requested."""
    model = replace(campaigns.entry(name, store.root.parent), recipes=RECIPES)
    plan = campaigns.plan_of([model], store, ledger)
    return replace(plan, items=(replace(plan.items[0], optional=tuple(optional)),))


def built(
    recipe: str, *, architecture: str = "a", failure: str | None = None, wall_s: float = 40.0
) -> Done:
    found = Failure(kind=failure, code="CP-CAPTURE", message="so it was") if failure else None
    result = BuildResult(
        key="", recipe=recipe, failure=found, wall_s=wall_s, architecture=architecture
    )
    return Done(handle=0, value=result)


def judged(speedups: Mapping[str, float]) -> Done:
    """Intervals reach 2% beyond the speedups."""
    reports = tuple(
        CandidateReport(
            recipe=name,
            build_key="",
            figures=Measured(speedup=value, speedup_ci=(value * 0.98, value * 1.02)),
        )
        for name, value in speedups.items()
    )
    winner = max(speedups, key=speedups.__getitem__)
    result = JudgeResult(verdict="kept-eager", reason="because", recipe=winner, candidates=reports)
    return Done(handle=0, value=result)


def finish(plan: Plan, store: Store, ledger: Ledger, ends: Sequence[Done]) -> tuple[Outcome, Fake]:
    [(item, outcome)], cluster, _ = executed(store, ledger, list(ends), plan)
    record(ledger, item, outcome)
    return outcome, cluster


def first(store: Store, ledger: Ledger) -> None:
    """A model of the architecture `a`, of which all recipes are judged."""
    outcome, cluster = finish(
        plan_of("first", store, ledger),
        store,
        ledger,
        [*map(built, RECIPES), judged({CHEAP: 1.5, SLOW: 1.1, FAST: 2.0})],
    )
    assert len(cluster.started) == 4
    assert outcome.architecture == "a"


def skipped(outcome: Outcome) -> dict[str, str | None]:
    return {
        report.recipe: report.problem for report in outcome.candidates if report.failure == SKIPPED
    }


def test_other_weights_skip_hopeless_recipes(store: Store, ledger: Ledger) -> None:
    first(store, ledger)
    plan = plan_of("second", store, ledger)
    said = explained(plan, store, ledger)
    assert (
        f"build {CHEAP}; then {SLOW}, {FAST}, unless earlier judgements of the same architecture"
        " rule them out; judge" in said
    )
    outcome, cluster = finish(
        plan, store, ledger, [built(CHEAP), built(FAST), judged({CHEAP: 1.4, FAST: 2.1})]
    )
    assert cluster.started == [
        f"build second {HERE} {CHEAP}",
        f"build second {HERE} {FAST}",
        f"judge second {HERE}",
    ]
    why = (
        f"{SKIPPED}: 1.10 times as fast as eager for first, of the same architecture; {FAST} was"
        " faster"
    )
    assert skipped(outcome) == {SLOW: why}
    third, _ = finish(
        plan_of("third", store, ledger),
        store,
        ledger,
        [built(CHEAP), built(FAST), judged({CHEAP: 1.4, FAST: 2.1})],
    )
    assert skipped(third) == {SLOW: why}, "what was skipped is known from the judgement before"
    other, cluster = finish(
        plan_of("other", store, ledger),
        store,
        ledger,
        [*(built(name, architecture="b") for name in RECIPES), judged({FAST: 2.0})],
    )
    assert (skipped(other), len(cluster.started)) == ({}, 4)


def test_requested_recipes_are_never_skipped(store: Store, ledger: Ledger) -> None:
    first(store, ledger)
    plan = plan_of("second", store, ledger, optional=())
    outcome, cluster = finish(plan, store, ledger, [*map(built, RECIPES), judged({FAST: 2.0})])
    assert (skipped(outcome), len(cluster.started)) == ({}, 4)


def test_hopeless_recipes_replace_failed_ones(store: Store, ledger: Ledger) -> None:
    first(store, ledger)
    ends = [
        built(CHEAP, failure="capture"),
        built(FAST, failure="capture"),
        built(SLOW),
        judged({SLOW: 1.2}),
    ]
    outcome, _ = finish(plan_of("second", store, ledger), store, ledger, ends)
    assert (outcome.verdict, skipped(outcome)) == ("kept-eager", {})
