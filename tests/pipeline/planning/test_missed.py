"""Recipes that circumstances kept from being built are retried by the next starts, a bounded number
of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from freezer.spec import SamplingPolicy
from freezer.store import Store
from pipeline.cluster import Done
from pipeline.failures import MOST_STARTS
from pipeline.ledger import Ledger
from pipeline.planning import Item, Plan
from pipeline.records import Outcome
from tests.support import campaigns
from tests.support.executions import (
    Fake,
    built,
    executed,
    explained,
    failure_of,
    judged,
    record,
)
from tests.support.steps import HERE

ONE = "torchscript-frozen"
OTHER = "torchscript-exact"


def plan_of(
    store: Store, ledger: Ledger, *, lift: bool = False, accept_noise: bool = False
) -> Plan:
    """Of one model for this machine's class, by two recipes."""
    model = campaigns.entry("m", store.root.parent)
    model = replace(model, recipes=(ONE, OTHER))
    plan = campaigns.plan_of(
        [model],
        store,
        ledger,
        lift_quarantine=lift,
        policy=SamplingPolicy(accept_noise=accept_noise),
    )
    return replace(plan, items=plan.items[:1])


def start(
    store: Store, ledger: Ledger, ends: Sequence[Done], plan: Plan
) -> tuple[Outcome, Fake, list[str]]:
    """A start of a campaign, whose outcome is kept as the publisher does."""
    [(item, outcome)], cluster, notes = executed(store, ledger, list(ends), plan)
    if not outcome.cached:
        record(ledger, item, outcome)
    return outcome, cluster, notes


def in_store(store: Store, item: Item, recipe: str) -> None:
    """What a build leaves."""
    (store.root / ".coldpress" / "candidates" / item.builds[recipe].digest).mkdir(parents=True)


ERROR = failure_of("error")


def first_start(store: Store, ledger: Ledger) -> None:
    """One recipe is built, the other fails, and the model is judged without it."""
    plan = plan_of(store, ledger)
    outcome, _, _ = start(store, ledger, [built(ONE), built(OTHER, ERROR), judged()], plan)
    assert outcome.verdict == "kept-eager"
    in_store(store, plan.items[0], ONE)


def test_next_start_builds_what_circumstances_prevented(store: Store, ledger: Ledger) -> None:
    first_start(store, ledger)
    plan = plan_of(store, ledger)
    (item,) = plan.items
    assert (item.finished, item.missed) == (None, (OTHER,))
    said = (
        f"m {HERE}: build {OTHER}; keep {ONE}; judge if it is built ({OTHER} failed (error);"
        " retrying, start 2 of 3)"
    )
    assert said in explained(plan, store, ledger)
    outcome, cluster, _ = start(store, ledger, [built(OTHER), judged()], plan)
    assert cluster.started == [f"build m {HERE} {OTHER}", f"judge m {HERE}"]
    assert not outcome.cached
    in_store(store, item, OTHER)
    again = plan_of(store, ledger).items[0]
    assert (again.why, again.finished is None) == ("unchanged", False)


def test_engine_is_tried_once_its_own_cpu_joins(store: Store, ledger: Ledger) -> None:
    model = campaigns.entry("m", store.root.parent)
    model = replace(model, recipes=(ONE, "onnxruntime"))

    def planned(is_best: bool) -> Plan:
        facts = replace(campaigns.FACTS, is_best=is_best)
        plan = campaigns.plan_of([model], store, ledger, facts=facts)
        return replace(plan, items=plan.items[:1])

    ends = [built(ONE), built("onnxruntime", failure_of("build", "CP-BETTER-CPU")), judged()]
    outcome, _, _ = start(store, ledger, ends, planned(False))
    assert f"onnxruntime: left out, since no node has {HERE}" in str(outcome.reason)
    assert planned(False).is_finished
    assert not planned(True).is_finished


def test_missed_recipe_is_given_up_after_some_starts(store: Store, ledger: Ledger) -> None:
    first_start(store, ledger)
    for _ in range(MOST_STARTS - 1):
        outcome, cluster, _ = start(store, ledger, [built(OTHER, ERROR)], plan_of(store, ledger))
        assert cluster.started == [f"build m {HERE} {OTHER}"]
        assert (outcome.verdict, outcome.cached) == ("kept-eager", True)
    given_up = plan_of(store, ledger)
    assert given_up.items[0].finished is not None
    assert (
        f"m {HERE}: unchanged ({OTHER} failed (error) in 3 starts; retried only with"
        " --lift-quarantine)" in explained(given_up, store, ledger)
    )
    lifted = plan_of(store, ledger, lift=True)
    assert lifted.items[0].missed == (OTHER,)
    _, cluster, _ = start(store, ledger, [built(OTHER), judged()], lifted)
    assert len(cluster.started) == 2


@pytest.mark.parametrize(("kind", "tried_again"), [("crash", []), ("timeout", [f"judge m {HERE}"])])
def test_candidate_that_ended_the_judge_is_kept_out(
    store: Store, ledger: Ledger, kind: str, tried_again: list[str]
) -> None:
    """A hang is tried once more, and nothing is built again."""
    why = failure_of(kind, tried_s=900)
    ends = [built(ONE), built(OTHER), judged(left_out={OTHER: why})]
    plan = plan_of(store, ledger)
    outcome, _, _ = start(store, ledger, ends, plan)
    reports = {report.recipe: (report.failure, report.problem) for report in outcome.candidates}
    assert reports == {ONE: (None, None), OTHER: (kind, why.message)}
    for recipe in (ONE, OTHER):
        in_store(store, plan.items[0], recipe)
    again = plan_of(store, ledger)
    if tried_again:
        assert again.items[0].missed == (OTHER,)
        _, cluster, _ = start(store, ledger, ends[2:], again)
        assert cluster.started == tried_again
    assert plan_of(store, ledger).items[0].finished is not None
    assert plan_of(store, ledger, lift=True).items[0].missed == (OTHER,)


@pytest.mark.parametrize(
    ("verdict", "left_out", "second", "problems"),
    [
        ("unstable", {OTHER}, {ONE}, [None, "so it was"]),
        ("failed", {ONE, OTHER}, {ONE, OTHER}, [None] * 2),
    ],
)
def test_next_judge_leaves_it_out_beside_others(
    store: Store,
    ledger: Ledger,
    verdict: str,
    left_out: set[str],
    second: set[str],
    problems: list[str | None],
) -> None:
    why = failure_of("crash")
    failure = why if verdict == "failed" else None
    first = judged(verdict, failure=failure, left_out=dict.fromkeys(left_out, why))
    ends = [built(ONE), built(OTHER), first, judged()]
    outcome, cluster, _ = start(store, ledger, ends, plan_of(store, ledger))
    assert set(cluster.requests[-1].builds) == second
    assert [report.problem for report in outcome.candidates] == problems


@pytest.mark.parametrize("verdict", ["failed", "unstable"])
def test_failed_revalidation_keeps_the_previous_result(
    store: Store, ledger: Ledger, verdict: str
) -> None:
    first_start(store, ledger)
    failure = failure_of("timeout") if verdict == "failed" else None
    ends = [built(OTHER), *[judged(verdict, failure=failure)] * 3]
    outcome, _, notes = start(store, ledger, ends, plan_of(store, ledger))
    assert (outcome.verdict, outcome.cached) == ("kept-eager", True)
    assert notes[-1].endswith("keeping the previous result")
    in_store(store, plan_of(store, ledger).items[0], OTHER)
    _, cluster, _ = start(store, ledger, [judged()], plan_of(store, ledger))
    assert cluster.started == [f"judge m {HERE}"]


def test_noisy_result_is_kept_while_noise_is_accepted(store: Store, ledger: Ledger) -> None:
    accepting = plan_of(store, ledger, accept_noise=True)
    noisy = judged("rejected", clock="disturbed")
    outcome, _, _ = start(store, ledger, [built(ONE), built(OTHER), noisy], accepting)
    assert outcome.clock == "disturbed"
    assert plan_of(store, ledger, accept_noise=True).items[0].finished is not None
    (again,) = plan_of(store, ledger).items
    assert (again.finished, again.why) == (
        None,
        "was measured on a busy machine with --accept-noise",
    )
    assert again.judge == accepting.items[0].judge, (
        "results of quiet machines stand with and without the option"
    )


def test_real_nodes_time_what_emulated_ones_judged(store: Store, ledger: Ledger) -> None:
    model = campaigns.entry("m", store.root.parent)

    def planned(emulated: bool) -> Item:
        facts = replace(campaigns.FACTS, emulated=emulated)
        return campaigns.plan_of([model], store, ledger, facts=facts).items[0]

    item = planned(True)
    record(ledger, item, replace(campaigns.judged(item, "kept-eager", store), clock="none"))
    assert planned(True).finished is not None
    again = planned(False)
    assert (again.finished, "emulated" in again.why) == (None, True)
