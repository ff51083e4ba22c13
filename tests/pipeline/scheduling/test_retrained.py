"""A retrained model: only the recipe that won is built, and its speed is inherited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from freezer.artifact import UNMEASURED, Measured, MeasuredDrift
from freezer.spec import Clock
from freezer.store import Store
from pipeline.cluster import Done
from pipeline.ledger import Ledger
from pipeline.planning.estimates import MAX_INHERITED
from pipeline.records import CandidateReport
from pipeline.worker import BuildResult, JudgeRequest, JudgeResult
from pipeline.workspace import ARCHITECTURE, workplace
from tests.support import campaigns
from tests.support.executions import Fake, executed, record

RECIPES = SLOW, ENGINE, ALONE = ("torchscript-frozen", "onnxruntime", "inductor-frozen")


def built(recipe: str, architecture: str = "a") -> Done:
    return Done(
        handle=0, value=BuildResult(key="", recipe=recipe, architecture=architecture, wall_s=1)
    )


def judged(*, clock: Clock = "wall", contest: str = "") -> Done:
    """The engine won; or, by the clock, inherited its speed."""
    speeds = {ALONE: 1.6, ENGINE: 2.0, SLOW: 1.1}
    reports = [
        CandidateReport(
            recipe=name,
            build_key="",
            figures=Measured(speedup=value, speedup_ci=(value * 0.98, value * 1.02)),
        )
        for name, value in speeds.items()
    ]
    drift = MeasuredDrift(error_ratio=1.5)
    result = JudgeResult(
        verdict="published",
        reason="because",
        recipe=ENGINE,
        candidates=tuple(reports),
        clock=clock,
        contest=contest,
        figures=replace(UNMEASURED, drift=drift),
    )
    return Done(handle=0, value=result)


def trained(
    seed: int,
    store: Store,
    ledger: Ledger,
    ends: Sequence[Done],
    recipes: Sequence[str] = RECIPES,
    stored: Sequence[str] = (),
) -> tuple[list[str], list[bool]]:
    """Run a campaign over a model with these weights; return what was built, and for each judge
    whether it inherits. A killed driver has not recorded the candidates that are `stored`.
    """
    model = replace(campaigns.entry("m", store.root.parent), recipes=RECIPES)
    model = replace(model, source=replace(model.source, seed=seed))
    plan = campaigns.plan_of([model], store, ledger)
    plan = replace(plan, items=(replace(plan.items[0], optional=tuple(recipes)),))
    for recipe in stored:
        key = plan.items[0].builds[recipe].digest
        folder = workplace(store.uri).folder("candidates", key)
        folder.mkdir(parents=True)
        (folder / ARCHITECTURE).write_text("a")
    cluster: Fake
    [(item, outcome)], cluster, _ = executed(store, ledger, list(ends), plan)
    record(ledger, item, outcome)
    judges = [each.inherits for each in cluster.requests if isinstance(each, JudgeRequest)]
    builds = [name.rpartition(" ")[2] for name in cluster.started if name.startswith("build")]
    return builds, judges


def first(store: Store, ledger: Ledger) -> None:
    ends = [*map(built, RECIPES), judged()]
    builds, judges = trained(0, store, ledger, ends)
    assert (set(builds), judges) == (set(RECIPES), [False])


def inherit(seed: int, store: Store, ledger: Ledger) -> None:
    ends = [built(ENGINE), built(ALONE), judged(clock="inherited")]
    builds, judges = trained(seed, store, ledger, ends)
    assert (set(builds), judges) == ({ALONE, ENGINE}, [True])


def test_retrained_model_builds_only_what_serves(store: Store, ledger: Ledger) -> None:
    first(store, ledger)
    inherit(1, store, ledger)
    inherit(2, store, ledger)


def test_every_tenth_version_is_timed(store: Store, ledger: Ledger) -> None:
    first(store, ledger)
    for seed in range(1, MAX_INHERITED + 1):
        inherit(seed, store, ledger)
    ends = [*map(built, RECIPES), judged()]
    builds, judges = trained(MAX_INHERITED + 1, store, ledger, ends)
    assert (set(builds), judges) == (set(RECIPES), [False])
    inherit(MAX_INHERITED + 2, store, ledger)


def test_unusual_drift_begins_a_contest(store: Store, ledger: Ledger) -> None:
    first(store, ledger)
    ends = [
        built(ENGINE),
        built(ALONE),
        judged(clock="none", contest="an unusual error ratio"),
        built(SLOW),
        judged(),
    ]
    builds, judges = trained(1, store, ledger, ends)
    assert (builds[-1], judges) == (SLOW, [True, False])


def test_other_architecture_begins_a_contest(store: Store, ledger: Ledger) -> None:
    first(store, ledger)
    ends = [*(built(name, "b") for name in (ENGINE, ALONE, SLOW)), judged()]
    builds, judges = trained(1, store, ledger, ends)
    assert (set(builds), judges) == (set(RECIPES), [False])


def test_requested_recipes_are_always_timed(store: Store, ledger: Ledger) -> None:
    first(store, ledger)
    ends = [*map(built, RECIPES), judged()]
    builds, judges = trained(1, store, ledger, ends, recipes=(ALONE,))
    assert (set(builds), judges) == (set(RECIPES), [False])


def test_a_killed_driver_begins_no_contest(store: Store, ledger: Ledger) -> None:
    first(store, ledger)
    ends = [judged(clock="inherited")]
    builds, judges = trained(1, store, ledger, ends, stored=(ENGINE, ALONE))
    assert (builds, judges) == ([], [True])
