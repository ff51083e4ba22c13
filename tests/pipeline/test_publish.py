"""Publishing and planning: versions when all classes are in, carried artifacts, kept-eager, and what counts as finished."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from freezer.artifact.folder import Artifact, write_artifact
from freezer.artifact.sections import GateRecord
from freezer.freezing.models.sources import parse_source
from freezer.limits import Limits
from freezer.spec.inputs import Dim, InputSpec
from freezer.spec.items import TensorSpec
from freezer.store.store import Store
from pipeline.catalog.entry import Entry
from pipeline.ledger.ledger import Ledger, ledger_folder
from pipeline.ledger.segments import LedgerRow, read_rows
from pipeline.planning.item import Item, Plan
from pipeline.planning.plan import auto_classes_of
from pipeline.publish import Publisher
from pipeline.records.failure import Failure
from pipeline.records.outcome import CandidateReport, Outcome
from pipeline.workspace.layout import judged_folder
from tests.conftest import Frozen
from tests.pipeline.campaigns import plan_of
from tests.steps import HERE


@pytest.fixture
def empty(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), create=True)


@pytest.fixture
def ledger(empty: Store) -> Iterator[Ledger]:
    with Ledger(empty, "test") as opened:
        yield opened


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    (tmp_path / "mod.py").write_text("def make(): ...\n")
    return Entry(
        name="mlp",
        source=parse_source("python:mod:make", folder=tmp_path, search_path=(str(tmp_path),)),
        spec=InputSpec(inputs=(TensorSpec(name="x", dtype="float32", shape=("n", 4)),), dims=(Dim(name="n", min=1, max=4),)),
        samples=None,
        task_metric=None,
        limits=Limits(),
        device_classes=("auto",),
        recipes=("torchscript-frozen",),
        files=(),
        search_path=(str(tmp_path),),
    )


@pytest.fixture
def plan(entry: Entry, empty: Store, ledger: Ledger) -> Callable[..., Plan]:
    """Plans the one entry anew, with changes."""

    def planned(**changed: object) -> Plan:
        return plan_of([replace(entry, **changed)], empty, ledger)  # type: ignore[arg-type]

    return planned


def judged(item: Item, verdict: str, store: Store, artifact: Artifact | None = None) -> Outcome:
    """An outcome as a judge gives it, with its artifact where judges leave theirs."""
    if artifact is not None:
        folder = judged_folder(str(store.root), item.judge.digest, item.entry.name)
        staging = folder.with_name("staging")
        shutil.copytree(artifact.folder, staging)
        folder.mkdir(parents=True)
        write_artifact(artifact.manifest, staging, folder / "artifact")
    return Outcome(
        model=item.entry.name,
        device_class=item.device_class,
        verdict=verdict,
        reason="because",
        num_threads=2,
        source="s",
        source_key=item.source.digest,
        judge_key=item.judge.digest,
    )


def _of(frozen: Frozen, item: Item) -> Artifact:
    """An artifact as a judge of the item's model would leave it."""
    return Artifact(folder=frozen.artifact.folder, manifest=replace(frozen.artifact.manifest, model=item.entry.name))


def publish_first(plan: Plan, store: Store, ledger: Ledger, scripted: Frozen, portable: Frozen) -> list[Outcome]:
    publisher = Publisher(plan, store, ledger)
    here, anywhere = plan.items
    assert publisher.add(here, judged(here, "published", store, scripted.artifact)) == [], "portable is not in yet"
    assert store.models() == []
    return publisher.add(anywhere, judged(anywhere, "published", store, portable.artifact))


def test_a_version_is_written_when_all_classes_are_in(
    plan: Callable[..., Plan], empty: Store, ledger: Ledger, scripted: Frozen, portable: Frozen
) -> None:
    first = plan()
    assert [item.device_class for item in first.items] == [HERE, "portable"]
    final = publish_first(first, empty, ledger, scripted, portable)
    version = empty.version("mlp")
    assert version.source_key == first.items[0].source.digest
    assert [(o.version, o.artifact) for o in final] == [(1, version.images[o.device_class]["digest"]) for o in final]
    assert not judged_folder(str(empty.root), first.items[0].judge.digest, "mlp").exists()
    again = plan()
    assert [item.why for item in again.items] == ["unchanged", "unchanged"]
    assert all(item.finished is not None and item.finished.cached for item in again.items)


def test_an_unchanged_outcome_is_kept_again_only_where_its_tags_are_others(
    plan: Callable[..., Plan], empty: Store, ledger: Ledger, scripted: Frozen, portable: Frozen
) -> None:
    publish_first(plan(), empty, ledger, scripted, portable)

    def passed_over(**changed: object) -> list[dict[str, str]]:
        """The tags in the ledger, after a start that has nothing to do."""
        again = plan(**changed)
        publisher, before = Publisher(again, empty, ledger), [newest(item).time for item in again.items]
        for item in again.items:
            assert item.finished is not None
            publisher.add(item, item.finished)
        rows.append([newest(item).time > at for item, at in zip(again.items, before, strict=True)])
        return [newest(item).data["outcome"]["tags"] for item in again.items]

    def newest(item: Item) -> LedgerRow:
        row = ledger.find("outcome", item.judge.digest, model="mlp")
        assert row is not None
        return row

    rows: list[list[bool]] = []
    assert passed_over() == [{}, {}]
    assert passed_over(tags={"team": "a"}) == [{"team": "a"}] * 2
    assert passed_over(tags={"team": "a"}) == [{"team": "a"}] * 2
    assert rows == [[False, False], [True, True], [False, False]], "written"


def test_kept_eager_on_a_cpu_is_served_by_the_portable_artifact(
    plan: Callable[..., Plan], empty: Store, ledger: Ledger, portable: Frozen
) -> None:
    here, anywhere = plan().items
    publisher = Publisher(plan(), empty, ledger)
    publisher.add(here, judged(here, "kept-eager", empty))
    final = publisher.add(anywhere, judged(anywhere, "published", empty, portable.artifact))
    images = empty.version("mlp").images
    assert set(images) == {"portable"}
    assert [outcome.artifact for outcome in final] == [images["portable"]["digest"]] * 2


@pytest.mark.parametrize("captured", [True, False])
def test_kept_eager_on_a_gpu_is_served_by_an_artifact_of_its_own(
    entry: Entry, empty: Store, ledger: Ledger, portable: Frozen, captured: bool
) -> None:
    gpu = "cuda-sm90"
    made = plan_of([replace(entry, device_classes=(gpu,))], empty, ledger, classes=(gpu, "portable"))
    here, anywhere = made.items
    assert here.builds["torchscript-frozen"].parts["recipe"]["settings"]["precision"], "TF32 is part of the key"
    publisher = Publisher(made, empty, ledger)
    own = Artifact(folder=portable.artifact.folder, manifest=replace(portable.artifact.manifest, device_class=gpu))
    publisher.add(here, judged(here, "kept-eager", empty, own if captured else None))
    served, _ = publisher.add(anywhere, judged(anywhere, "published", empty, portable.artifact))
    images = empty.version("mlp").images
    assert set(images) == ({gpu, "portable"} if captured else {"portable"})
    assert served.artifact == (images[gpu]["digest"] if captured else None)
    assert not judged_folder(str(empty.root), here.judge.digest, "mlp").exists()


def test_nothing_is_published_of_a_model_that_fails_and_what_was_published_stays(
    plan: Callable[..., Plan], empty: Store, ledger: Ledger, scripted: Frozen, portable: Frozen
) -> None:
    publish_first(plan(), empty, ledger, scripted, portable)
    stricter = plan(limits=Limits(speedup_min=9))
    publisher = Publisher(stricter, empty, ledger)
    for item in stricter.items:
        assert item.finished is None
        final = publisher.add(item, judged(item, "rejected", empty))
    assert [(outcome.version, outcome.artifact) for outcome in final] == [(None, None)] * 2
    assert empty.versions("mlp") == [1]


def test_a_judge_that_crashed_does_so_once_though_the_driver_is_killed_before_the_other_classes_are_in(
    plan: Callable[..., Plan], empty: Store, ledger: Ledger, portable: Frozen
) -> None:
    first = plan()
    here, anywhere = first.items
    crashed = replace(judged(here, "failed", empty), failure=Failure(kind="crash", code="CP-CRASH", message="because"))
    publisher = Publisher(first, empty, ledger)
    assert publisher.add(here, crashed) == []
    again, other = plan().items
    assert again.finished == crashed.as_cached()
    assert other.finished is None
    final = publisher.add(anywhere, judged(anywhere, "published", empty, portable.artifact))
    assert [outcome.verdict for outcome in final] == ["failed", "published"]
    rows = [row.device_class for row in read_rows(ledger_folder(empty)) if row.kind == "outcome"]
    assert sorted(rows) == [HERE, "portable"], "each is written once"


def test_a_class_that_is_not_judged_again_is_carried_over_from_the_same_source(
    plan: Callable[..., Plan], empty: Store, ledger: Ledger, scripted: Frozen, portable: Frozen
) -> None:
    publish_first(plan(), empty, ledger, scripted, portable)
    before = empty.version("mlp").images
    only_portable = Plan(items=plan(limits=Limits(speedup_min=2)).items[1:])
    changed = Artifact(
        folder=portable.artifact.folder,
        manifest=replace(portable.artifact.manifest, gate=GateRecord(error_ratio_max=2, speedup_min=1)),
    )
    (final,) = Publisher(only_portable, empty, ledger).add(
        only_portable.items[0], judged(only_portable.items[0], "published", empty, changed)
    )
    after = empty.version("mlp")
    assert (final.version, after.number) == (2, 2)
    assert after.images[HERE] == before[HERE]
    assert after.images["portable"] != before["portable"]


def test_a_class_that_nothing_is_built_for_is_done_again_with_other_weights(
    plan: Callable[..., Plan], empty: Store, ledger: Ledger, portable: Frozen, tmp_path: Path
) -> None:
    def publish(planned: Plan) -> None:
        publisher = Publisher(planned, empty, ledger)
        here, anywhere = planned.items
        assert (dict(here.builds), len(anywhere.builds)) == ({}, 1)
        publisher.add(here, here.finished or judged(here, "kept-eager", empty))
        publisher.add(anywhere, judged(anywhere, "published", empty, portable.artifact))

    publish(plan(recipes=("portable",)))
    before = empty.version("mlp").source_key
    (tmp_path / "mod.py").write_text("def make(): ...  # otherwise\n")
    os.utime(tmp_path / "mod.py", ns=(1, 1))
    second = plan(recipes=("portable",))
    assert [item.finished for item in second.items] == [None, None]
    publish(second)
    assert before != empty.version("mlp").source_key == second.items[0].source.digest


def test_models_that_are_the_same_but_for_their_names_have_artifacts_of_their_own(
    entry: Entry, empty: Store, ledger: Ledger, portable: Frozen
) -> None:
    twins = plan_of([replace(entry, name=name) for name in ("mlp", "twin")], empty, ledger, classes=("portable",))
    first, second = twins.items
    assert first.judge.digest == second.judge.digest
    publisher = Publisher(twins, empty, ledger)
    reached = [(item, judged(item, "published", empty, _of(portable, item))) for item in twins.items]
    assert [outcome.version for item, outcome in reached for outcome in publisher.add(item, outcome)] == [1, 1]
    pulled = [empty.pull(empty.version(name), "portable", empty.root.parent / name) for name in ("mlp", "twin")]
    assert [artifact.manifest.model for artifact in pulled] == ["mlp", "twin"]


@pytest.mark.parametrize("cleared", [False, True], ids=["judged by both", "judged by the other"])
def test_what_another_campaign_published_meanwhile_is_taken_over(
    plan: Callable[..., Plan], empty: Store, ledger: Ledger, scripted: Frozen, portable: Frozen, cleared: bool
) -> None:
    made = plan()
    publisher = Publisher(made, empty, ledger)
    with Ledger(empty, "faster") as other:
        publish_first(made, empty, other, scripted, portable)
    if cleared:
        outcomes = [judged(item, "published", empty) for item in made.items]
    else:
        artifacts = (scripted.artifact, portable.artifact)
        outcomes = [judged(item, "published", empty, own) for item, own in zip(made.items, artifacts, strict=True)]
    final = [found for item, outcome in zip(made.items, outcomes, strict=True) for found in publisher.add(item, outcome)]
    assert empty.versions("mlp") == [1]
    assert [(outcome.version, outcome.cached) for outcome in final] == [(1, True)] * 2
    assert not any(judged_folder(str(empty.root), item.judge.digest, "mlp").exists() for item in made.items)


def test_what_was_judged_without_a_recipe_is_no_other_campaigns_to_publish_or_to_clear_away(
    plan: Callable[..., Plan], empty: Store, ledger: Ledger, portable: Frozen
) -> None:
    def reached(item: Item, *missing: str) -> Outcome:
        artifact = _of(portable, item)
        folder = judged_folder(str(empty.root), item.judge.digest, item.entry.name, missing)
        artifact = replace(artifact, manifest=replace(artifact.manifest, provenance={"without": list(missing)}))
        made = shutil.copytree(artifact.folder, empty.root.parent / "made", dirs_exist_ok=True)
        folder.mkdir(parents=True)
        write_artifact(artifact.manifest, made, folder / "artifact")
        failed = [CandidateReport(recipe=name, build_key=name, problem="late", failure="timeout") for name in missing]
        return replace(judged(item, "published", empty), candidates=tuple(failed))

    (item,) = plan(recipes=("portable",)).items[1:]
    alone = Plan(items=(item,))
    with Ledger(empty, "fuller") as other:
        less, more = reached(item, "torchscript-frozen"), reached(item)
        (first,) = Publisher(alone, empty, ledger).add(item, less)
        assert empty.manifest(empty.version("mlp"), "portable").provenance == {"without": ["torchscript-frozen"]}
        (second,) = Publisher(alone, empty, other).add(item, more)
        assert empty.manifest(empty.version("mlp"), "portable").provenance == {"without": []}
        assert (first.version, second.version, second.cached) == (1, 2, False)
    (third,) = Publisher(alone, empty, ledger).add(item, reached(item, "torchscript-frozen"))
    assert (third.version, third.cached) == (2, True), "what was reached with more stands for it"
    assert list((empty.root / ".coldpress" / "judged").iterdir()) == []


def test_what_was_judged_and_is_gone_is_a_failure_of_the_disk(
    plan: Callable[..., Plan], empty: Store, ledger: Ledger, portable: Frozen
) -> None:
    here, anywhere = plan().items
    publisher = Publisher(plan(), empty, ledger)
    publisher.add(here, judged(here, "published", empty))
    final = publisher.add(anywhere, judged(anywhere, "published", empty, portable.artifact))
    assert [(lost.verdict, lost.failure_kind, lost.version) for lost in final] == [("failed", "disk", None)] * 2
    assert f"what was judged of mlp for {HERE} is gone from the store" in str(final[0].reason)
    assert empty.models() == []


def test_explain_names_what_changed(
    plan: Callable[..., Plan], empty: Store, ledger: Ledger, scripted: Frozen, portable: Frozen, entry: Entry
) -> None:
    assert {item.why for item in plan().items} == {"never done"}
    publish_first(plan(), empty, ledger, scripted, portable)
    assert plan(limits=Limits(speedup_min=2)).items[0].why == "differs from the nearest finished in limits.speedup_min"
    other = replace(entry.source, args={"hidden": 2})
    assert plan(source=other).items[0].why == "differs from the nearest finished in source.args.hidden"


@pytest.mark.parametrize(
    ("verdict", "failure"), [("failed", "timeout"), ("failed", "error"), ("failed", "disk"), ("unstable", None)]
)
def test_what_the_circumstances_did_is_tried_again(
    plan: Callable[..., Plan], empty: Store, ledger: Ledger, verdict: str, failure: str | None
) -> None:
    first = plan()
    publisher = Publisher(first, empty, ledger)
    for item in first.items:
        publisher.add(item, replace(judged(item, verdict, empty), failure=Failure(kind=failure) if failure else None))
    assert all(item.finished is None and "never kept" in item.why for item in plan().items)


def test_an_outcome_whose_version_is_gone_is_not_finished(
    plan: Callable[..., Plan], empty: Store, ledger: Ledger, scripted: Frozen, portable: Frozen
) -> None:
    publish_first(plan(), empty, ledger, scripted, portable)
    shutil.rmtree(empty.root / "mlp")
    assert {item.why for item in plan().items} == {"version 1 is gone from the store"}


def test_auto_is_each_kind_of_nodes_best_level() -> None:
    nodes = [("cpu-x86-64-v3", "portable"), ("cpu-x86-64-v3", "cpu-x86-64-v4", "portable"), ("portable",)]
    assert set(auto_classes_of(nodes)) == {"cpu-x86-64-v3", "cpu-x86-64-v4", "portable"}
    assert set(auto_classes_of(nodes[1:])) == {"cpu-x86-64-v4", "portable"}
