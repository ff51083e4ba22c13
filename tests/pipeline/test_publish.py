"""Publishing versions, carried artifacts, kept-eager, and which outcomes count as finished."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from freezer.artifact import Artifact, GateRecord, PreviousRecord
from freezer.spec import Limits
from freezer.store import Store
from pipeline.catalog import Entry
from pipeline.ledger import Ledger
from pipeline.planning import Item, Plan
from pipeline.publish import Publisher
from pipeline.records import Outcome
from tests.conftest import Frozen
from tests.support.campaigns import entry, judged, judged_folder, plan_of
from tests.support.steps import HERE, blob_of, flip_a_byte

REGATED = Limits(error_ratio_max=2)
"""Limits under which everything is judged again."""


def regated(artifact: Artifact) -> Artifact:
    """The artifact as judged with other gates."""
    gate = GateRecord(error_ratio_max=2, speedup_min=1)
    return replace(artifact, manifest=replace(artifact.manifest, gate=gate))


@dataclass(frozen=True)
class Site:
    """A store with a model for this machine's class and for `portable`."""

    model: Entry
    store: Store
    ledger: Ledger
    artifacts: Mapping[str, Artifact]

    def plan(self, **changed: object) -> Plan:
        """Plan the model, with changes to its entry."""
        made = replace(self.model, **changed)  # type: ignore[arg-type]
        return plan_of([made], self.store, self.ledger)

    def outcome(self, item: Item, verdict: str, *, again: bool = False) -> Outcome:
        """The outcome of a judge, with the artifact of its class if it was published."""
        artifact = self.artifacts[item.device_class] if verdict == "published" else None
        return judged(
            item, verdict, self.store, regated(artifact) if again and artifact else artifact
        )

    def publish(self, plan: Plan, *verdicts: str, again: bool = False) -> list[Outcome]:
        """Publish outcomes with these verdicts, one for each item; return the final ones."""
        publisher = Publisher(plan, self.store, self.ledger)
        final: list[Outcome] = []
        for item, verdict in zip(plan.items, verdicts, strict=True):
            final += publisher.add(item, self.outcome(item, verdict, again=again))
        return final

    def publish_first(self) -> list[Outcome]:
        """Publish version 1, with an artifact of both classes."""
        return self.publish(self.plan(), "published", "published")

    @property
    def images(self) -> dict[str, str]:
        """Digests of the images that `latest` has, by class."""
        return {name: image.digest for name, image in self.store.version("mlp").images.items()}

    def has_judged(self, item: Item) -> bool:
        """Whether the folder of a judged artifact is left."""
        return judged_folder(self.store.root, item.judge.digest, "mlp").exists()


@pytest.fixture
def site(tmp_path: Path, store: Store, ledger: Ledger, scripted: Frozen, portable: Frozen) -> Site:
    model = replace(entry("mlp", tmp_path), device_classes=("auto",))
    return Site(model, store, ledger, {HERE: scripted.artifact, "portable": portable.artifact})


def test_version_is_published_after_the_last_class(site: Site) -> None:
    first = site.plan()
    here, anywhere = first.items
    publisher = Publisher(first, site.store, site.ledger)
    assert publisher.add(here, site.outcome(here, "published")) == [], "portable is not in yet"
    assert site.store.models() == []
    final = publisher.add(anywhere, site.outcome(anywhere, "published"))
    assert site.store.version("mlp").source_key == here.source.digest
    assert {outcome.device_class: outcome.artifact for outcome in final} == site.images
    assert [outcome.version for outcome in final] == [1, 1]
    assert not site.has_judged(here)
    again = site.plan()
    assert [item.why for item in again.items] == ["unchanged", "unchanged"]
    assert all(item.finished is not None and item.finished.cached for item in again.items)


def test_kept_eager_cpu_uses_the_portable_artifact(site: Site) -> None:
    final = site.publish(site.plan(), "kept-eager", "published")
    assert set(site.images) == {"portable"}
    assert [outcome.artifact for outcome in final] == [site.images["portable"]] * 2


@pytest.mark.parametrize("captured", [True, False])
def test_kept_eager_gpu_has_its_own_artifact(site: Site, captured: bool) -> None:
    gpu, store = "cuda-sm90", site.store
    model = replace(site.model, device_classes=(gpu,))
    made = plan_of([model], store, site.ledger, classes=(gpu, "portable"))
    here, anywhere = made.items
    recipe = here.builds["torchscript-frozen"].parts["recipe"]
    assert recipe["settings"]["precision"], "TF32 is part of the key"
    portable = site.artifacts["portable"]
    own = replace(portable, manifest=replace(portable.manifest, device_class=gpu))
    publisher = Publisher(made, store, site.ledger)
    publisher.add(here, judged(here, "kept-eager", store, own if captured else None))
    served, _ = publisher.add(anywhere, site.outcome(anywhere, "published"))
    assert set(site.images) == ({gpu, "portable"} if captured else {"portable"})
    assert served.artifact == (site.images[gpu] if captured else None)
    assert not site.has_judged(here)


@pytest.mark.parametrize("verdict", ["unstable", "failed", "rejected", "kept-previous"])
def test_previous_artifact_serves_without_a_new_one(site: Site, verdict: str) -> None:
    site.publish_first()
    before = site.images[HERE]
    final, _ = site.publish(site.plan(limits=REGATED), verdict, "published", again=True)
    assert site.store.versions("mlp") == [1, 2]
    assert site.store.version("mlp:2").images[HERE].digest == site.images[HERE] == before
    assert str(final.reason).endswith(f"; version 1 still serves {HERE}")


def test_damaged_previous_artifact_does_not_stop_a_campaign(site: Site) -> None:
    site.publish_first()
    layout = site.store.layout("mlp")
    config = layout.image(site.store.version("mlp").images[HERE]).config
    flip_a_byte(blob_of(site.store.root / "mlp", config.digest))
    again = site.plan(limits=REGATED)
    unstable, published = site.publish(again, "unstable", "published", again=True)
    assert (unstable.reason, published.version) == ("because", 2)


def test_latest_has_one_source(site: Site) -> None:
    """A class without a verdict on the new source gets its portable artifact."""
    site.publish_first()
    changed = site.plan(source=replace(site.model.source, seed=7))
    assert changed.items[0].source.digest != site.store.version("mlp").source_key
    final, _ = site.publish(changed, "unstable", "published", again=True)
    assert site.store.version("mlp") == site.store.version("mlp:2")
    assert set(site.images) == {"portable"}
    assert (final.version, final.artifact) == (2, site.images["portable"])
    assert str(final.reason).endswith(f"; portable of version 2 serves {HERE}")
    site.publish(changed, "published", "published")
    assert site.store.version("mlp") == site.store.version("mlp:3")
    assert set(site.images) == {HERE, "portable"}


def test_inherited_speed_is_published_and_timed_again(site: Site) -> None:
    site.publish_first()
    changed = site.plan(source=replace(site.model.source, seed=7))
    here, anywhere = changed.items
    made = judged(here, "unstable", site.store, regated(site.artifacts[HERE]))
    publisher = Publisher(changed, site.store, site.ledger)
    publisher.add(here, replace(made, clock="inherited"))
    final, _ = publisher.add(anywhere, site.outcome(anywhere, "published", again=True))
    assert (final.version, final.artifact) == (2, site.images[HERE])
    again = site.plan(source=replace(site.model.source, seed=7))
    assert [item.finished is None for item in again.items] == [True, False]


def test_version_without_portable_is_not_latest(site: Site) -> None:
    site.publish_first()
    before = site.images
    changed = site.plan(source=replace(site.model.source, seed=7))
    final = site.publish(changed, "published", "failed", again=True)
    assert [outcome.version for outcome in final] == [2, None]
    assert site.images == before


def test_kept_previous_is_finished_until_something_changes(site: Site) -> None:
    site.publish_first()
    previous = PreviousRecord(
        version=1,
        artifact=site.images[HERE],
        recipe="r",
        torch="2.13",
        same_weights=True,
        speedup=0.8,
    )
    first = site.plan(limits=REGATED)
    here, anywhere = first.items
    publisher = Publisher(first, site.store, site.ledger)
    publisher.add(here, replace(site.outcome(here, "kept-previous"), previous=previous))
    kept, _ = publisher.add(anywhere, site.outcome(anywhere, "published", again=True))
    assert kept.to_json()["previous"]["speedup"] == 0.8
    assert not kept.failed
    again = site.plan(limits=REGATED)
    assert [item.why for item in again.items] == ["unchanged", "unchanged"]
    assert again.items[0].finished == replace(kept, cached=True)
    allowed = site.plan(limits=replace(REGATED, allow_regression=True))
    assert [item.finished is None for item in allowed.items] == [True, False]
    assert allowed.items[0].judge == here.judge
    assert "--allow-regression" in allowed.items[0].why
    others = [regated(artifact) for artifact in site.artifacts.values()]
    site.store.publish("mlp", source_key="other", artifacts=others)
    assert "another artifact serves now" in site.plan(limits=REGATED).items[0].why


def test_equal_models_have_separate_artifacts(site: Site, tmp_path: Path) -> None:
    models = [replace(site.model, name=name) for name in ("mlp", "twin")]
    twins = plan_of(models, site.store, site.ledger, classes=("portable",))
    assert len({item.judge.digest for item in twins.items}) == 1
    assert [outcome.version for outcome in site.publish(twins, "published", "published")] == [1, 1]
    for name in ("mlp", "twin"):
        pulled = site.store.pull(site.store.version(name), "portable", tmp_path / name)
        assert pulled.manifest.model == name


@pytest.mark.parametrize("cleared", [False, True], ids=["judged by both", "judged by the other"])
def test_version_of_another_campaign_is_reused(site: Site, cleared: bool) -> None:
    made = site.plan()
    publisher = Publisher(made, site.store, site.ledger)
    with Ledger(site.store, "faster") as other:
        replace(site, ledger=other).publish(made, "published", "published")
    final: list[Outcome] = []
    for item in made.items:
        cleared_outcome = judged(item, "published", site.store)
        final += publisher.add(
            item, cleared_outcome if cleared else site.outcome(item, "published")
        )
    assert site.store.versions("mlp") == [1]
    assert [(outcome.version, outcome.cached) for outcome in final] == [(1, True)] * 2
    assert not any(map(site.has_judged, made.items))


def test_lost_judged_artifact_is_a_disk_failure(site: Site) -> None:
    plan = site.plan()
    here, anywhere = plan.items
    publisher = Publisher(plan, site.store, site.ledger)
    publisher.add(here, judged(here, "published", site.store))
    final = publisher.add(anywhere, site.outcome(anywhere, "published"))
    ends = [(lost.verdict, lost.failure_kind, lost.version) for lost in final]
    assert ends == [("failed", "disk", None)] * 2
    assert HERE in str(final[0].reason)
    assert site.store.models() == []


@pytest.mark.parametrize("lost", ["model", "index", "image", "payload"])
def test_what_the_store_lost_is_made_again(site: Site, lost: str) -> None:
    site.publish_first()
    folder = site.store.root / "mlp"
    payload = site.artifacts[HERE].manifest.contents[0].digest
    digests = {
        "index": site.store.layout("mlp").tags()["1"].digest,
        "image": site.images[HERE],
        "payload": payload,
    }
    if lost in digests:
        blob_of(folder, digests[lost]).unlink()
    else:
        shutil.rmtree(folder)
    again = site.plan()
    made = [item.device_class for item in again.items if item.finished is None]
    assert made == ([HERE] if lost in ("image", "payload") else [HERE, "portable"])
    assert [note.partition(":")[0] for note in again.notes] == [f"mlp {name}" for name in made]
    publisher = Publisher(again, site.store, site.ledger)
    for item in again.items:
        publisher.add(item, item.finished or site.outcome(item, "published"))
    assert site.plan().is_finished
    assert blob_of(folder, payload).is_file()
