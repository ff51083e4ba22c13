"""What earlier judgements of an architecture spare: hopeless recipes are skipped, and a retrained
model builds only the recipe that won, whose speed it inherits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from freezer.artifact import UNMEASURED, MeasuredDrift
from freezer.store import Store
from pipeline.cluster import Done
from pipeline.ledger import Ledger
from pipeline.planning import Plan
from pipeline.planning.estimates import MAX_INHERITED
from pipeline.records import SKIPPED, Outcome
from pipeline.worker import JudgeRequest
from pipeline.workspace import ARCHITECTURE, workplace
from tests.support import campaigns
from tests.support.executions import (
    Fake,
    built,
    executed,
    explained,
    failure_of,
    judged,
    record,
    reports_of,
)
from tests.support.steps import HERE

RECIPES = SLOW, ENGINE, ALONE = ("torchscript-frozen", "onnxruntime", "inductor-frozen")
CHEAP, HOPELESS, FAST = THREE = ("torchscript-frozen", "torchscript-exact", "inductor-frozen")


def of(recipe: str, architecture: str = "a", *, failed: bool = False) -> Done:
    """A build of a model of an architecture."""
    failure = failure_of("capture") if failed else None
    return built(recipe, failure, wall_s=40.0, architecture=architecture)


def timed(*speedups: float, recipes: Sequence[str] = RECIPES, **fields: object) -> Done:
    """A judge of recipes with these speedups."""
    found = dict(zip(recipes, speedups, strict=False))
    figures = replace(UNMEASURED, drift=MeasuredDrift(error_ratio=1.5))
    recipe = max(found, key=found.__getitem__)
    reports = reports_of(found)
    return judged("published", recipe=recipe, candidates=reports, figures=figures, **fields)


CONTEST = timed(1.1, 2.0, 1.6)
"""The engine won."""
INHERITED = timed(1.1, 2.0, 1.6, clock="inherited")


def plan_of(
    store: Store,
    ledger: Ledger,
    *,
    name: str = "m",
    seed: int = 0,
    recipes: Sequence[str] = RECIPES,
    optional: Sequence[str] | None = None,
) -> Plan:
    """Of a model with these weights for this machine's class, by recipes that `auto` requested."""
    model = replace(campaigns.entry(name, store.root.parent), recipes=tuple(recipes))
    model = replace(model, source=replace(model.source, seed=seed))
    plan = campaigns.plan_of([model], store, ledger)
    own = tuple(recipes if optional is None else optional)
    return replace(plan, items=(replace(plan.items[0], optional=own),))


def finish(plan: Plan, store: Store, ledger: Ledger, ends: Sequence[Done]) -> tuple[Outcome, Fake]:
    [(item, outcome)], cluster, _ = executed(store, ledger, list(ends), plan)
    record(ledger, item, outcome)
    return outcome, cluster


# Hopeless recipes


def first(store: Store, ledger: Ledger) -> None:
    """A model of the architecture `a`, of which all recipes are judged."""
    plan = plan_of(store, ledger, name="first", recipes=THREE)
    ends = [*map(of, THREE), timed(1.5, 1.1, 2.0, recipes=THREE)]
    outcome, cluster = finish(plan, store, ledger, ends)
    assert (len(cluster.started), outcome.architecture) == (4, "a")


def skipped(outcome: Outcome) -> dict[str, str | None]:
    return {
        report.recipe: report.problem for report in outcome.candidates if report.failure == SKIPPED
    }


def test_other_weights_skip_hopeless_recipes(store: Store, ledger: Ledger) -> None:
    first(store, ledger)
    ends = [of(CHEAP), of(FAST), timed(1.4, 2.1, recipes=(CHEAP, FAST))]
    plan = plan_of(store, ledger, name="second", recipes=THREE)
    said = explained(plan, store, ledger)
    assert f"build {CHEAP}; then {HOPELESS}, {FAST}, unless earlier judgements" in said
    for name in ("second", "third"):
        plan = plan_of(store, ledger, name=name, recipes=THREE)
        outcome, cluster = finish(plan, store, ledger, ends)
        assert cluster.started == [
            f"build {name} {HERE} {CHEAP}",
            f"build {name} {HERE} {FAST}",
            f"judge {name} {HERE}",
        ]
        assert skipped(outcome) == {
            HOPELESS: f"{SKIPPED}: 1.10 times as fast as eager for first, of the same architecture;"
            f" {FAST} was faster"
        }
    ends = [*(of(name, "b") for name in THREE), timed(2.0)]
    plan = plan_of(store, ledger, name="other", recipes=THREE)
    other, cluster = finish(plan, store, ledger, ends)
    assert (skipped(other), len(cluster.started)) == ({}, 4)


def test_requested_recipes_are_never_skipped(store: Store, ledger: Ledger) -> None:
    first(store, ledger)
    plan = plan_of(store, ledger, name="second", recipes=THREE, optional=())
    outcome, cluster = finish(plan, store, ledger, [*map(of, THREE), timed(2.0)])
    assert (skipped(outcome), len(cluster.started)) == ({}, 4)


def test_hopeless_recipes_replace_failed_ones(store: Store, ledger: Ledger) -> None:
    first(store, ledger)
    failed = [of(CHEAP, failed=True), of(FAST, failed=True)]
    plan = plan_of(store, ledger, name="second", recipes=THREE)
    outcome, _ = finish(plan, store, ledger, [*failed, of(HOPELESS), judged()])
    assert (outcome.verdict, skipped(outcome)) == ("kept-eager", {})


# Retrained models


def trained(
    seed: int,
    store: Store,
    ledger: Ledger,
    ends: Sequence[Done],
    optional: Sequence[str] = RECIPES,
    stored: Sequence[str] = (),
) -> tuple[list[str], list[bool]]:
    """Run a campaign over a model with these weights; return what was built, and for each judge
    whether it inherits. A killed driver has not recorded the candidates that are `stored`.
    """
    plan = plan_of(store, ledger, seed=seed, optional=optional)
    for recipe in stored:
        folder = workplace(store.uri).folder("candidates", plan.items[0].builds[recipe].digest)
        folder.mkdir(parents=True)
        (folder / ARCHITECTURE).write_text("a")
    _, cluster = finish(plan, store, ledger, ends)
    judges = [each.inherits for each in cluster.requests if isinstance(each, JudgeRequest)]
    builds = [name.rpartition(" ")[2] for name in cluster.started if name.startswith("build")]
    return builds, judges


def contest(
    seed: int,
    store: Store,
    ledger: Ledger,
    order: Sequence[str] = RECIPES,
    architecture: str = "a",
    optional: Sequence[str] = RECIPES,
) -> None:
    """Every recipe is built, in some order, and timed."""
    ends = [*(of(name, architecture) for name in order), CONTEST]
    builds, judges = trained(seed, store, ledger, ends, optional)
    assert (set(builds), judges) == (set(RECIPES), [False])


def inherit(seed: int, store: Store, ledger: Ledger) -> None:
    builds, judges = trained(seed, store, ledger, [of(ENGINE), of(ALONE), INHERITED])
    assert (set(builds), judges) == ({ALONE, ENGINE}, [True])


def test_every_tenth_version_is_timed(store: Store, ledger: Ledger) -> None:
    """Of the others only what serves is built."""
    contest(0, store, ledger)
    for seed in range(1, MAX_INHERITED + 1):
        inherit(seed, store, ledger)
    contest(MAX_INHERITED + 1, store, ledger)
    inherit(MAX_INHERITED + 2, store, ledger)


def test_unusual_drift_begins_a_contest(store: Store, ledger: Ledger) -> None:
    contest(0, store, ledger)
    unusual = timed(1.1, 2.0, 1.6, clock="none", contest="an unusual error ratio")
    ends = [of(ENGINE), of(ALONE), unusual, of(SLOW), CONTEST]
    builds, judges = trained(1, store, ledger, ends)
    assert (builds[-1], judges) == (SLOW, [True, False])


def test_other_architecture_begins_a_contest(store: Store, ledger: Ledger) -> None:
    contest(0, store, ledger)
    contest(1, store, ledger, (ENGINE, ALONE, SLOW), "b")


def test_requested_recipes_are_always_timed(store: Store, ledger: Ledger) -> None:
    contest(0, store, ledger)
    contest(1, store, ledger, optional=(ALONE,))


def test_a_killed_driver_begins_no_contest(store: Store, ledger: Ledger) -> None:
    contest(0, store, ledger)
    builds, judges = trained(1, store, ledger, [INHERITED], stored=(ENGINE, ALONE))
    assert (builds, judges) == ([], [True])
