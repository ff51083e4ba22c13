"""Promotions in store and MLflow together, and what is removed beside campaigns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from freezer.artifact import Artifact
from freezer.errors import InfrastructureError, NotPublishedError
from freezer.store import WORK, Cleaning, Store
from pipeline.ledger import Ledger
from pipeline.lifecycle import clean, needs_of, promote
from pipeline.tracking import aliased_artifacts
from tests.conftest import Frozen
from tests.support.campaigns import run_judged
from tests.support.services import with_golden
from tests.support.steps import HERE

NOW = Cleaning(keep=1, grace_s=0.0)
FIRST = {"first": {HERE: "published", "portable": "published"}}


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture
def artifacts(scripted: Frozen, portable: Frozen) -> dict[str, Artifact]:
    return {HERE: scripted.artifact, "portable": portable.artifact}


@pytest.fixture
def campaign(tmp_path: Path, uri: str, artifacts: dict[str, Artifact]) -> Store:
    """A store after a campaign that logged `first` to MLflow."""
    store = Store.open(str(tmp_path / "store"), create=True)
    assert run_judged(store, uri, "one", artifacts, models=FIRST).exit_code == 0
    return store


def publish_another(store: Store, artifacts: dict[str, Artifact], folder: Path) -> None:
    """A version that MLflow does not know."""
    changed = with_golden(artifacts["portable"], folder, error=0.0)
    store.publish("first", source_key="other", artifacts=[changed])


def aliases(uri: str) -> dict[str, Any]:
    found: dict[str, Any] = MlflowClient(uri).get_registered_model("first").aliases
    return found


def move(store: Store, reference: str, uri: str | None, *, remove: bool = False) -> None:
    promote(store, reference, "prod", share=None, remove=remove, tracking_uri=uri)


def test_promotions_move_store_and_aliases(campaign: Store, uri: str) -> None:
    move(campaign, "first:1", uri)
    assert campaign.version("first:prod").number == 1
    found = aliases(uri)
    assert found[f"prod-{HERE}"] == found[HERE] != found["portable"]
    assert found["prod"] == found["prod-portable"] == found["portable"]
    assert set(aliased_artifacts(uri)) == {
        image.digest for image in campaign.version("first").index
    }
    move(campaign, "first", uri, remove=True)
    assert campaign.find("first:prod") is None
    assert aliases(uri).keys() == {HERE, "portable"}


def test_what_mlflow_lacks_is_not_promoted(
    campaign: Store, uri: str, artifacts: dict[str, Artifact], tmp_path: Path
) -> None:
    move(campaign, "first:1", uri)
    before = aliases(uri)
    publish_another(campaign, artifacts, tmp_path / "other")
    with pytest.raises(NotPublishedError):
        move(campaign, "first:2", uri)
    assert (campaign.version("first:prod").number, aliases(uri)) == (1, before)
    assert len(campaign.notes("first").moves) == 1
    move(campaign, "first:2", None)
    assert campaign.version("first:prod").number == 2


def test_refused_aliases_leave_all_as_it_was(
    campaign: Store, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow refuses the second alias."""
    before, put = aliases(uri), MlflowClient.set_registered_model_alias

    def refusing(client: MlflowClient, name: str, alias: str, version: str) -> None:
        if alias == "prod-portable":
            raise ConnectionError("refused")
        put(client, name, alias, version)

    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", refusing)
    with pytest.raises(InfrastructureError):
        move(campaign, "first:1", uri)
    assert (campaign.find("first:prod"), aliases(uri)) == (None, before)
    assert not campaign.notes("first").moves


def work(store: Store, *paths: str) -> None:
    for path in paths:
        file = store.root / WORK / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(100))


def left(store: Store) -> set[str]:
    kinds = ("candidates", "judged", "sources", "logs")
    found = (path for kind in kinds for path in (store.root / WORK / kind).rglob("*"))
    return {str(path.relative_to(store.root / WORK)) for path in found if path.is_file()}


def cleaned(store: Store, cleaning: Cleaning = NOW) -> set[str]:
    found, errors = clean(store, cleaning, needs_of(store, print))
    assert not errors
    return {f"{item.kind} {item.name}" for item in found if item.removed}


WORK_FILES = ("candidates/c/a", "judged/j-first/a", "sources/s/a", "sources/mlflow/m-1/a")


def test_finished_work_is_removed(campaign: Store) -> None:
    work(campaign, *WORK_FILES, "logs/old.log", "logs/b.log", "weights/w/a", "objects/o")
    weights = campaign.root / WORK / "weights/w/a"
    marked = replace(NOW, grace_s=3600.0)
    assert not cleaned(campaign, marked)
    assert left(campaign) >= set(WORK_FILES)
    expected = {"candidates candidates/c", "judged judged/j-first", "logs logs/old"}
    assert cleaned(campaign, replace(marked, now=NOW.now + 7200)) == {
        *expected,
        "sources sources/s",
        "sources sources/mlflow/m-1",
    }
    assert left(campaign) == {"logs/b.log"}, "of the last outcome's candidate"
    assert weights.exists()


def test_a_running_campaign_keeps_everything(campaign: Store) -> None:
    work(campaign, *WORK_FILES)
    for number in ("2", "3"):
        campaign.layout("first").retag({number: campaign.version("first:1").descriptor})
    with Ledger(campaign, "one"):  # it has not recorded what it is about
        assert not cleaned(campaign)
        assert left(campaign) == set(WORK_FILES)
    with Ledger(campaign, "other") as other:
        other.append("campaign", "other", model="", device_class="", data=_record("first"))
        assert not cleaned(campaign)
    cleaned(campaign)
    assert left(campaign) == {"judged/j-first/a"}, "the other one did not reach its model"


def test_unfinished_campaigns_keep_their_work(campaign: Store) -> None:
    work(campaign, *WORK_FILES, "judged/k-second/a", "candidates/d/a")
    with Ledger(campaign, "killed") as ledger:
        ledger.append("campaign", "killed", model="", device_class="", data=_record("second"))
        ledger.append("build", "d", model="second", device_class="portable", data={"failure": None})
    cleaned(campaign)
    assert left(campaign) == {"judged/k-second/a", "candidates/d/a"}


def _record(model: str) -> Any:
    return {
        "catalog": "c.yaml",
        "started": 1e9,
        "members": [["k", model, "portable", False]],
        "problems": [],
    }


def test_versions_with_an_alias_stay(
    campaign: Store, uri: str, artifacts: dict[str, Artifact], tmp_path: Path
) -> None:
    for index in range(3):
        changed = with_golden(artifacts["portable"], tmp_path / str(index), error=0.0)
        campaign.publish("first", source_key=str(index), artifacts=[changed])
    aliased = aliased_artifacts(uri)
    needed = replace(NOW, is_needed=lambda v: any(i.digest in aliased for i in v.index))
    cleaned(campaign, needed)
    assert campaign.versions("first") == [1, 3, 4]
    cleaned(campaign)
    assert campaign.versions("first") == [3, 4]
