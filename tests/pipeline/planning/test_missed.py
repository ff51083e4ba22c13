"""Recipes that circumstances kept from being built are retried by the next starts, a bounded number
of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from freezer.spec import SamplingPolicy
from freezer.store import Store
from pipeline.cluster import Done
from pipeline.failures import CODES, MOST_STARTS
from pipeline.ledger import Ledger
from pipeline.planning import Item, Plan
from pipeline.records import Failure, Outcome
from pipeline.worker import BuildResult, JudgeResult
from tests.support import campaigns, outcomes
from tests.support.executions import Fake, executed, explained, record
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


def built(recipe: str, failure: str | None = None, code: str | None = None) -> Done:
    found = (
        Failure(kind=failure, code=code or CODES.get(failure), message="so it was")
        if failure
        else None
    )
    result = BuildResult(key="", recipe=recipe, failure=found)
    return Done(handle=0, value=result)


def judged(verdict: str = "kept-eager") -> Done:
    failed: dict[str, Any] = (
        {"failure": Failure(kind="timeout", code="CP-TIMEOUT")} if verdict == "failed" else {}
    )
    return Done(handle=0, value=JudgeResult(verdict=verdict, reason="because", **failed))


def in_store(store: Store, item: Item, recipe: str) -> None:
    """What a build leaves."""
    (store.root / ".coldpress" / "candidates" / item.builds[recipe].digest).mkdir(parents=True)


def first_start(store: Store, ledger: Ledger, failure: str, code: str | None = None) -> Item:
    """One recipe is built, the other fails, and the model is judged without it."""
    plan = plan_of(store, ledger)
    ends = [built(ONE), built(OTHER, failure, code), judged()]
    outcome, _, _ = start(store, ledger, ends, plan)
    assert outcome.verdict == "kept-eager"
    in_store(store, plan.items[0], ONE)
    return plan.items[0]


def test_next_start_builds_what_circumstances_prevented(store: Store, ledger: Ledger) -> None:
    first_start(store, ledger, "error")
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

    ends = [built(ONE), built("onnxruntime", "build", "CP-BETTER-CPU"), judged()]
    outcome, _, _ = start(store, ledger, ends, planned(False))
    assert f"onnxruntime: left out, since no node has {HERE}" in str(outcome.reason)
    assert planned(False).is_finished
    assert not planned(True).is_finished


def test_missed_recipe_is_given_up_after_some_starts(store: Store, ledger: Ledger) -> None:
    first_start(store, ledger, "error")
    for _ in range(MOST_STARTS - 1):
        outcome, cluster, _ = start(store, ledger, [built(OTHER, "error")], plan_of(store, ledger))
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
    why = Failure(kind=kind, code=CODES[kind], message="why", tried_s=900)
    without = JudgeResult(verdict="kept-eager", reason="because", left_out={OTHER: why})
    ends = [built(ONE), built(OTHER), Done(handle=0, value=without)]
    plan = plan_of(store, ledger)
    outcome, _, _ = start(store, ledger, ends, plan)
    reports = {report.recipe: (report.failure, report.problem) for report in outcome.candidates}
    assert reports == {ONE: (None, None), OTHER: (kind, "why")}
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
        ("unstable", {OTHER}, {ONE}, [None, "why"]),
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
    why = Failure(kind="crash", code="CP-CRASH", message="why")
    failure = why if verdict == "failed" else None
    first = JudgeResult(
        verdict=verdict, reason="", failure=failure, left_out=dict.fromkeys(left_out, why)
    )
    ends = [built(ONE), built(OTHER), Done(handle=0, value=first), judged()]
    outcome, cluster, _ = start(store, ledger, ends, plan_of(store, ledger))
    assert cluster.judged[1] == second
    assert [report.problem for report in outcome.candidates] == problems


@pytest.mark.parametrize("verdict", ["failed", "unstable"])
def test_failed_revalidation_keeps_the_previous_result(
    store: Store, ledger: Ledger, verdict: str
) -> None:
    first_start(store, ledger, "timeout")
    num_judges = 3 if verdict == "unstable" else 1
    outcome, _, notes = start(
        store, ledger, [built(OTHER), *[judged(verdict)] * num_judges], plan_of(store, ledger)
    )
    assert (outcome.verdict, outcome.cached) == ("kept-eager", True)
    assert notes[-1].endswith("keeping the previous result")
    in_store(store, plan_of(store, ledger).items[0], OTHER)
    _, cluster, _ = start(store, ledger, [judged()], plan_of(store, ledger))
    assert cluster.started == [f"judge m {HERE}"]


def test_noisy_result_is_kept_while_noise_is_accepted(store: Store, ledger: Ledger) -> None:
    accepting = plan_of(store, ledger, accept_noise=True)
    done = judged("rejected")
    noisy = replace(done, value=replace(done.value, clock="disturbed"))
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
    outcome = outcomes.outcome("m", judge_key=item.judge.digest, device_class=HERE, clock="none")
    record(ledger, item, replace(outcome, verdict="published", version=None))
    assert planned(True).finished is not None
    again = planned(False)
    assert (again.finished, "emulated" in again.why) == (None, True)
