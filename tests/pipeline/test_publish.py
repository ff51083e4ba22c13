"""Publishing versions, carried artifacts, kept-eager, and which outcomes count as finished."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from freezer.artifact import Artifact, GateRecord, PreviousRecord
from freezer.spec import Limits
from freezer.store import Store
from pipeline.catalog import Entry
from pipeline.ledger import Ledger, ledger_folder, read_rows
from pipeline.planning import Item, Plan, auto_classes_of
from pipeline.publish import Publisher
from pipeline.records import Failure, Outcome
from pipeline.tracking import Tracker
from tests.conftest import Frozen
from tests.support.campaigns import entry, judged, judged_folder, plan_of, run_judged
from tests.support.steps import HERE, flip_a_byte


@pytest.fixture
def model(tmp_path: Path) -> Entry:
    return replace(entry("mlp", tmp_path), device_classes=("auto",))


@pytest.fixture
def plan(model: Entry, store: Store, ledger: Ledger) -> Callable[..., Plan]:
    """Plans the model, with changes to its entry."""

    def planned(**changed: object) -> Plan:
        return plan_of([replace(model, **changed)], store, ledger)  # type: ignore[arg-type]

    return planned


def _of(frozen: Frozen, item: Item) -> Artifact:
    """An artifact as a judge of the item's model would leave it."""
    return Artifact(
        folder=frozen.artifact.folder,
        manifest=replace(frozen.artifact.manifest, model=item.entry.name),
    )


def publish_first(
    plan: Plan, store: Store, ledger: Ledger, scripted: Frozen, portable: Frozen
) -> list[Outcome]:
    publisher = Publisher(plan, store, ledger)
    here, anywhere = plan.items
    assert publisher.add(here, judged(here, "published", store, scripted.artifact)) == [], (
        "portable is not in yet"
    )
    assert store.models() == []
    return publisher.add(anywhere, judged(anywhere, "published", store, portable.artifact))


def test_version_is_published_after_the_last_class(
    plan: Callable[..., Plan], store: Store, ledger: Ledger, scripted: Frozen, portable: Frozen
) -> None:
    first = plan()
    assert [item.device_class for item in first.items] == [HERE, "portable"]
    final = publish_first(first, store, ledger, scripted, portable)
    version = store.version("mlp")
    assert version.source_key == first.items[0].source.digest
    assert [(o.version, o.artifact) for o in final] == [
        (1, version.images[o.device_class].digest) for o in final
    ]
    assert not judged_folder(store.root, first.items[0].judge.digest, "mlp").exists()
    again = plan()
    assert [item.why for item in again.items] == ["unchanged", "unchanged"]
    assert all(item.finished is not None and item.finished.cached for item in again.items)


def test_unchanged_outcome_is_recorded_only_with_new_tags(
    plan: Callable[..., Plan], store: Store, ledger: Ledger, scripted: Frozen, portable: Frozen
) -> None:
    publish_first(plan(), store, ledger, scripted, portable)
    for tags, num_new in (({}, 0), ({"team": "a"}, 2), ({"team": "a"}, 0)):
        again = plan(tags=tags)
        publisher, before = (
            Publisher(again, store, ledger),
            len(list(read_rows(ledger_folder(store)))),
        )
        for item in again.items:
            assert item.finished is not None
            publisher.add(item, item.finished)
        rows = list(read_rows(ledger_folder(store)))
        assert len(rows) == before + num_new
        assert all(row.data["outcome"]["tags"] == tags for row in rows[before:])


def test_kept_eager_cpu_uses_the_portable_artifact(
    plan: Callable[..., Plan], store: Store, ledger: Ledger, portable: Frozen
) -> None:
    here, anywhere = plan().items
    publisher = Publisher(plan(), store, ledger)
    publisher.add(here, judged(here, "kept-eager", store))
    final = publisher.add(anywhere, judged(anywhere, "published", store, portable.artifact))
    images = store.version("mlp").images
    assert set(images) == {"portable"}
    assert [outcome.artifact for outcome in final] == [images["portable"].digest] * 2


@pytest.mark.parametrize("captured", [True, False])
def test_kept_eager_gpu_has_its_own_artifact(
    model: Entry, store: Store, ledger: Ledger, portable: Frozen, captured: bool
) -> None:
    gpu = "cuda-sm90"
    made = plan_of(
        [replace(model, device_classes=(gpu,))], store, ledger, classes=(gpu, "portable")
    )
    here, anywhere = made.items
    assert here.builds["torchscript-frozen"].parts["recipe"]["settings"]["precision"], (
        "TF32 is part of the key"
    )
    publisher = Publisher(made, store, ledger)
    own = Artifact(
        folder=portable.artifact.folder,
        manifest=replace(portable.artifact.manifest, device_class=gpu),
    )
    publisher.add(here, judged(here, "kept-eager", store, own if captured else None))
    served, _ = publisher.add(anywhere, judged(anywhere, "published", store, portable.artifact))
    images = store.version("mlp").images
    assert set(images) == ({gpu, "portable"} if captured else {"portable"})
    assert served.artifact == (images[gpu].digest if captured else None)
    assert not judged_folder(store.root, here.judge.digest, "mlp").exists()


def test_rejected_model_keeps_its_version(
    plan: Callable[..., Plan], store: Store, ledger: Ledger, scripted: Frozen, portable: Frozen
) -> None:
    publish_first(plan(), store, ledger, scripted, portable)
    stricter = plan(limits=Limits(speedup_min=9, error_ratio_max=1))
    publisher = Publisher(stricter, store, ledger)
    for item in stricter.items:
        assert item.finished is None
        final = publisher.add(item, judged(item, "rejected", store))
    assert [(outcome.version, outcome.artifact) for outcome in final] == [(None, None)] * 2
    assert store.versions("mlp") == [1]


@pytest.mark.parametrize("verdict", ["unstable", "failed", "rejected", "kept-previous"])
def test_previous_artifact_serves_without_a_new_one(
    plan: Callable[..., Plan],
    store: Store,
    ledger: Ledger,
    scripted: Frozen,
    portable: Frozen,
    verdict: str,
) -> None:
    publish_first(plan(), store, ledger, scripted, portable)
    before = store.version("mlp").images[HERE]
    here, anywhere = plan(limits=Limits(error_ratio_max=2)).items
    publisher = Publisher(Plan(items=(here, anywhere)), store, ledger)
    publisher.add(here, judged(here, verdict, store))
    final, _ = publisher.add(anywhere, judged(anywhere, "published", store, regated(portable)))
    assert store.versions("mlp") == [1, 2]
    assert store.version("mlp").images[HERE] == store.version("mlp:2").images[HERE] == before
    assert str(final.reason).endswith(f"; version 1 still serves {HERE}")


def test_damaged_previous_artifact_does_not_stop_a_campaign(
    plan: Callable[..., Plan], store: Store, ledger: Ledger, scripted: Frozen, portable: Frozen
) -> None:
    publish_first(plan(), store, ledger, scripted, portable)
    config = store.layout("mlp").image(store.version("mlp").images[HERE]).config
    flip_a_byte(store.root / "mlp" / "blobs" / "sha256" / config.digest.removeprefix("sha256:"))
    here, anywhere = plan(limits=Limits(error_ratio_max=2)).items
    publisher = Publisher(Plan(items=(here, anywhere)), store, ledger)
    publisher.add(here, judged(here, "unstable", store))
    unstable, published = publisher.add(
        anywhere, judged(anywhere, "published", store, regated(portable))
    )
    assert (unstable.reason, published.version) == ("because", 2)


def test_an_unreadable_index_does_not_stop_a_campaign(
    plan: Callable[..., Plan], store: Store, ledger: Ledger, scripted: Frozen, portable: Frozen
) -> None:
    publish_first(plan(), store, ledger, scripted, portable)
    (store.root / "mlp" / "index.json").write_text('{"schema')
    items = plan(limits=Limits(error_ratio_max=2)).items
    publisher = Publisher(Plan(items=items), store, ledger)
    outcomes = [
        outcome
        for item in items
        for outcome in publisher.add(item, judged(item, "rejected", store))
    ]
    assert [outcome.reason for outcome in outcomes] == ["because", "because"]


@pytest.mark.parametrize("verdict", ["unstable", "failed", "kept-previous"])
def test_campaign_without_a_new_version_keeps_a_rollback(
    plan: Callable[..., Plan],
    store: Store,
    ledger: Ledger,
    scripted: Frozen,
    portable: Frozen,
    verdict: str,
) -> None:
    """The outcome that was published stays that of version 2, which has its artifact, and version 1
    serves.
    """
    publish_first(plan(), store, ledger, scripted, portable)
    here, anywhere = plan(limits=Limits(error_ratio_max=2)).items
    publisher = Publisher(Plan(items=(here, anywhere)), store, ledger)
    publisher.add(here, judged(here, "published", store, regated(scripted)))
    publisher.add(anywhere, judged(anywhere, "published", store, regated(portable)))
    rolled_back = store.roll_back("mlp", 1)
    here, _ = plan(limits=Limits(error_ratio_max=2, speedup_min=9)).items
    anywhere = plan(limits=Limits(error_ratio_max=2)).items[1]
    assert anywhere.finished is not None
    publisher = Publisher(Plan(items=(here, anywhere)), store, ledger)
    publisher.add(here, judged(here, verdict, store))
    kept, carried = publisher.add(anywhere, anywhere.finished)
    assert store.version("mlp") == rolled_back
    assert store.versions("mlp") == [1, 2]
    assert (carried.version, carried.artifact) == (
        2,
        store.version("mlp:2").images["portable"].digest,
    )
    assert str(kept.reason).endswith(f"; version 1 still serves {HERE}")


def test_latest_keeps_a_class_that_a_new_source_lacks(
    plan: Callable[..., Plan],
    model: Entry,
    store: Store,
    ledger: Ledger,
    scripted: Frozen,
    portable: Frozen,
) -> None:
    publish_first(plan(), store, ledger, scripted, portable)
    before = store.version("mlp").images[HERE]
    changed = plan(source=replace(model.source, seed=7))
    here, anywhere = changed.items
    assert here.source.digest != store.version("mlp").source_key
    publisher = Publisher(changed, store, ledger)
    publisher.add(here, judged(here, "unstable", store))
    final, _ = publisher.add(anywhere, judged(anywhere, "published", store, regated(portable)))
    assert set(store.version("mlp:2").images) == {"portable"}
    assert store.version("mlp").number == 2
    assert store.version("mlp").images == {**store.version("mlp:2").images, HERE: before}
    assert str(final.reason).endswith(
        f"; version 1, made from an earlier source, still serves {HERE}"
    )
    again = Publisher(changed, store, ledger)
    again.add(anywhere, judged(anywhere, "published", store, regated(portable)))
    again.add(here, judged(here, "published", store, scripted.artifact))
    assert store.version("mlp").images == store.version("mlp:3").images
    assert store.version("mlp").images[HERE] != before


def test_kept_previous_is_finished_until_something_changes(
    plan: Callable[..., Plan], store: Store, ledger: Ledger, scripted: Frozen, portable: Frozen
) -> None:
    publish_first(plan(), store, ledger, scripted, portable)
    serving = store.version("mlp").images[HERE].digest
    previous = PreviousRecord(
        version=1, artifact=serving, recipe="r", torch="2.13", same_weights=True, speedup=0.8
    )
    slower = {"limits": Limits(error_ratio_max=2)}
    first = plan(**slower)
    publisher = Publisher(first, store, ledger)
    publisher.add(
        first.items[0], replace(judged(first.items[0], "kept-previous", store), previous=previous)
    )
    kept, _ = publisher.add(
        first.items[1], judged(first.items[1], "published", store, regated(portable))
    )
    assert kept.to_json()["previous"]["speedup"] == 0.8
    assert not kept.failed
    again = plan(**slower)
    assert [item.why for item in again.items] == ["unchanged", "unchanged"]
    assert again.items[0].finished == kept.as_cached()
    allowed = plan_of([again.items[0].entry], store, ledger, allow_regression=True)
    assert allowed.items[0].finished is None
    assert allowed.items[0].judge == first.items[0].judge
    assert (
        allowed.items[0].why
        == "was kept-previous; judging again because --allow-regression was given"
    )
    assert allowed.items[1].finished is not None
    store.publish("mlp", source_key="other", artifacts=[regated(scripted)])
    assert plan(**slower).items[0].why == "was kept-previous, and another artifact serves now"


def regated(frozen: Frozen) -> Artifact:
    """The artifact as judged with other gates."""
    return replace(
        frozen.artifact,
        manifest=replace(
            frozen.artifact.manifest, gate=GateRecord(error_ratio_max=2, speedup_min=1)
        ),
    )


def test_crashed_judge_is_recorded_at_once(
    plan: Callable[..., Plan], store: Store, ledger: Ledger, portable: Frozen
) -> None:
    first = plan()
    here, anywhere = first.items
    crashed = replace(
        judged(here, "failed", store),
        failure=Failure(kind="crash", code="CP-CRASH", message="because"),
    )
    publisher = Publisher(first, store, ledger)
    assert publisher.add(here, crashed) == []
    again, other = plan().items
    assert again.finished == crashed.as_cached()
    assert other.finished is None
    final = publisher.add(anywhere, judged(anywhere, "published", store, portable.artifact))
    assert [outcome.verdict for outcome in final] == ["failed", "published"]
    rows = [row.device_class for row in read_rows(ledger_folder(store)) if row.kind == "outcome"]
    assert sorted(rows) == [HERE, "portable"], "each is written once"


def test_other_classes_are_carried_over(
    plan: Callable[..., Plan], store: Store, ledger: Ledger, scripted: Frozen, portable: Frozen
) -> None:
    publish_first(plan(), store, ledger, scripted, portable)
    before = store.version("mlp").images
    only_portable = Plan(items=plan(limits=Limits(error_ratio_max=2)).items[1:])
    (final,) = Publisher(only_portable, store, ledger).add(
        only_portable.items[0],
        judged(only_portable.items[0], "published", store, regated(portable)),
    )
    after = store.version("mlp")
    assert (final.version, after.number) == (2, 2)
    assert after.images[HERE] == before[HERE]
    assert after.images["portable"] != before["portable"]


def test_equal_models_have_separate_artifacts(
    model: Entry, store: Store, ledger: Ledger, portable: Frozen
) -> None:
    twins = plan_of(
        [replace(model, name=name) for name in ("mlp", "twin")],
        store,
        ledger,
        classes=("portable",),
    )
    first, second = twins.items
    assert first.judge.digest == second.judge.digest
    publisher = Publisher(twins, store, ledger)
    reached = [
        (item, judged(item, "published", store, _of(portable, item))) for item in twins.items
    ]
    assert [
        outcome.version for item, outcome in reached for outcome in publisher.add(item, outcome)
    ] == [1, 1]
    pulled = [
        store.pull(store.version(name), "portable", store.root.parent / name)
        for name in ("mlp", "twin")
    ]
    assert [artifact.manifest.model for artifact in pulled] == ["mlp", "twin"]


@pytest.mark.parametrize("cleared", [False, True], ids=["judged by both", "judged by the other"])
def test_version_of_another_campaign_is_reused(
    plan: Callable[..., Plan],
    store: Store,
    ledger: Ledger,
    scripted: Frozen,
    portable: Frozen,
    cleared: bool,
) -> None:
    made = plan()
    publisher = Publisher(made, store, ledger)
    with Ledger(store, "faster") as other:
        publish_first(made, store, other, scripted, portable)
    if cleared:
        outcomes = [judged(item, "published", store) for item in made.items]
    else:
        artifacts = (scripted.artifact, portable.artifact)
        outcomes = [
            judged(item, "published", store, own)
            for item, own in zip(made.items, artifacts, strict=True)
        ]
    final = [
        found
        for item, outcome in zip(made.items, outcomes, strict=True)
        for found in publisher.add(item, outcome)
    ]
    assert store.versions("mlp") == [1]
    assert [(outcome.version, outcome.cached) for outcome in final] == [(1, True)] * 2
    assert not any(
        judged_folder(store.root, item.judge.digest, "mlp").exists() for item in made.items
    )


def test_lost_judged_artifact_is_a_disk_failure(
    plan: Callable[..., Plan], store: Store, ledger: Ledger, portable: Frozen
) -> None:
    here, anywhere = plan().items
    publisher = Publisher(plan(), store, ledger)
    publisher.add(here, judged(here, "published", store))
    final = publisher.add(anywhere, judged(anywhere, "published", store, portable.artifact))
    assert [(lost.verdict, lost.failure_kind, lost.version) for lost in final] == [
        ("failed", "disk", None)
    ] * 2
    assert f"the judged artifact of mlp for {HERE} is missing from the store" in str(
        final[0].reason
    )
    assert store.models() == []


def test_explain_names_what_changed(
    plan: Callable[..., Plan],
    store: Store,
    ledger: Ledger,
    scripted: Frozen,
    portable: Frozen,
    model: Entry,
) -> None:
    assert {item.why for item in plan().items} == {"never done"}
    publish_first(plan(), store, ledger, scripted, portable)
    assert (
        plan(limits=Limits(speedup_min=2)).items[0].why
        == "differs from the nearest finished in limits.speedup_min"
    )
    other = replace(model.source, args={**model.source.args, "hidden": 2})
    assert (
        plan(source=other).items[0].why == "differs from the nearest finished in source.args.hidden"
    )


@pytest.mark.parametrize(("verdict", "failure"), [("failed", "timeout"), ("unstable", None)])
def test_failures_of_circumstances_are_retried(
    plan: Callable[..., Plan], store: Store, ledger: Ledger, verdict: str, failure: str | None
) -> None:
    first = plan()
    publisher = Publisher(first, store, ledger)
    for item in first.items:
        publisher.add(
            item,
            replace(
                judged(item, verdict, store), failure=Failure(kind=failure) if failure else None
            ),
        )
    assert all(item.finished is None and "never kept" in item.why for item in plan().items)


def test_outcome_without_its_version_is_not_finished(
    plan: Callable[..., Plan], store: Store, ledger: Ledger, scripted: Frozen, portable: Frozen
) -> None:
    publish_first(plan(), store, ledger, scripted, portable)
    shutil.rmtree(store.root / "mlp")
    assert {item.why for item in plan().items} == {"version 1 is gone from the store"}


def test_auto_is_the_best_level_of_each_node() -> None:
    nodes = [
        ("cpu-x86-64-v3", "portable"),
        ("cpu-x86-64-v3", "cpu-x86-64-v4", "portable"),
        ("portable",),
    ]
    assert set(auto_classes_of(nodes)) == {"cpu-x86-64-v3", "cpu-x86-64-v4", "portable"}
    assert set(auto_classes_of(nodes[1:])) == {"cpu-x86-64-v4", "portable"}


def test_interrupt_while_mlflow_is_updated_names_the_replay(
    store: Store, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Tracker, "finish", interrupted)
    report = run_judged(
        store, uri, "stopped", {}, models={"gone": {HERE: "failed", "portable": "failed"}}
    )
    assert (report.exit_code, len(report.outcomes)) == (130, 2)
    assert (
        f"`python -m jobs.replay stopped --store {store.root} --tracking-uri {uri}`"
        in report.infrastructure[0]
    )


def test_speed_limits_do_not_concern_portable(plan: Callable[..., Plan]) -> None:
    keys = [
        [item.judge.digest for item in plan(limits=limits).items]
        for limits in (Limits(), Limits(speedup_min=2, size_mb_max=1))
    ]
    assert keys[0][0] != keys[1][0]
    assert keys[0][1] == keys[1][1]
