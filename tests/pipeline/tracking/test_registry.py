"""Registering artifacts, against a real sqlite MLflow: a campaign and models of its own for every test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from torch import nn

from freezer.artifact.folder import Artifact
from freezer.artifact.markdown import manifest_markdown
from freezer.errors import ContractError, IntegrityError
from freezer.store.store import Store
from pipeline.records.outcome import Outcome
from pipeline.tracking.projection import Projection
from pipeline.tracking.registry import alias, register
from tests.pipeline.tracking.outcomes import X, outcome


def registered(projection: Projection, item: Outcome, artifact: Artifact, **changes: Any) -> str:
    settings: dict[str, Any] = {"run_id": None, "mode": "copy", "store_uri": "store", "campaign": "first", **changes}
    return register(projection.client, projection.experiment_id, item, artifact, **settings)


def uploads(projection: Projection, digest: str) -> list[Any]:
    return list(projection.client.search_logged_models([projection.experiment_id], f"tags.`coldpress.artifact` = '{digest}'"))


def test_a_registered_artifact_loads_by_its_alias(projection: Projection, artifact: Artifact, source: nn.Module) -> None:
    item = outcome("by.alias", artifact="sha256:" + 64 * "1")
    run_id = projection.log_outcome(item, artifact.manifest)
    version = registered(projection, item, artifact, run_id=run_id)
    found = projection.client.get_model_version_by_alias("by.alias", "portable")
    assert (found.version, found.run_id) == (int(version), run_id)
    expected = {"coldpress.artifact": item.artifact, "coldpress.version": "3", "coldpress.device_class": "portable"}
    assert expected.items() <= found.tags.items()
    assert found.tags["coldpress.store"] == str(Path("store").absolute())
    model = mlflow.pyfunc.load_model("models:/by.alias@portable")
    answer = model.predict({"input": X})
    np.testing.assert_allclose(answer, source(torch.from_numpy(X)).detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(model.predict(X), answer)
    assert model.get_raw_model().manifest.version == 3
    assert model.metadata.signature.inputs.inputs[0].shape == (-1, 4)
    with pytest.raises(ContractError, match="batch"):
        model.predict({"input": np.zeros((9, 4), np.float32)})


def test_the_whole_artifact_is_registered_and_verified(projection: Projection, artifact: Artifact) -> None:
    item = outcome("whole", artifact="sha256:" + 64 * "2")
    registered(projection, item, artifact)
    (upload,) = uploads(projection, str(item.artifact))
    folder = Path(upload.artifact_location.removeprefix("file://"))
    copied = Artifact.read(folder / "artifact")
    copied.verify()
    assert copied.manifest == replace(artifact.manifest, version=3)
    assert (folder / "requirements.txt").read_text().splitlines()[:3] == [
        "coldpress",
        f"torch>={artifact.manifest.needs['torch']}",
        "safetensors",
    ]
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert (folder / "artifact" / "evidence" / "all-captured-code.txt").is_file()
    assert (folder / "freezing.md").read_text() == manifest_markdown(copied.manifest)


def test_registering_twice_makes_one_version(projection: Projection, artifact: Artifact) -> None:
    item = outcome("once", artifact="sha256:" + 64 * "3")
    first = registered(projection, item, artifact)
    projection.client.delete_registered_model_alias("once", "portable")
    assert registered(projection, item, artifact) == first
    assert projection.client.get_model_version_by_alias("once", "portable").version == int(first)
    assert len(projection.client.search_model_versions("name = 'once'")) == 1
    assert len(uploads(projection, str(item.artifact))) == 1
    second = registered(projection, replace(item, artifact="sha256:" + 64 * "4", version=4), artifact)
    assert second != first
    assert projection.client.get_model_version_by_alias("once", "portable").version == int(second)


def test_an_upload_that_broke_off_is_thrown_away_and_a_complete_one_used(projection: Projection, artifact: Artifact) -> None:
    item = outcome("crashed", artifact="sha256:" + 64 * "5")
    tags = {"coldpress.artifact": str(item.artifact), "coldpress.campaign": "first"}
    broken = projection.client.create_logged_model(projection.experiment_id, name="broken", tags=tags)
    registered(projection, item, artifact)
    (upload,) = uploads(projection, str(item.artifact))
    assert upload.model_id != broken.model_id
    projection.client.delete_registered_model("crashed")
    registered(projection, item, artifact)
    assert [found.model_id for found in uploads(projection, str(item.artifact))] == [upload.model_id]


def test_an_upload_of_another_campaign_is_left_alone_for_a_day(
    projection: Projection, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = outcome("under.way", artifact="sha256:" + 32 * "17")
    tags = {"coldpress.artifact": str(item.artifact), "coldpress.campaign": "another"}
    others = projection.client.create_logged_model(projection.experiment_id, name="others", tags=tags)
    registered(projection, item, artifact)
    assert others.model_id in {found.model_id for found in uploads(projection, str(item.artifact))}
    projection.client.delete_registered_model("under.way")
    monkeypatch.setattr("pipeline.tracking.registry.ABANDONED_S", -1.0)
    registered(projection, item, artifact)
    assert others.model_id not in {found.model_id for found in uploads(projection, str(item.artifact))}


def test_two_campaigns_that_register_one_artifact_together_make_one_version(projection: Projection, artifact: Artifact) -> None:
    item = outcome("together", artifact="sha256:" + 32 * "18")
    client, others = projection.client, []

    class Slow(MlflowClient):  # type: ignore[misc]
        def log_model_artifacts(self, model_id: str, local_dir: str) -> None:
            others.append(registered(projection, item, artifact, campaign="another"))  # begun, and ended, meanwhile
            super().log_model_artifacts(model_id, local_dir)

    slow = Slow(client.tracking_uri)
    settings: dict[str, Any] = {"run_id": None, "mode": "copy", "store_uri": "store", "campaign": "first"}
    assert register(slow, projection.experiment_id, item, artifact, **settings) == others[0]
    assert [str(found.version) for found in client.search_model_versions("name = 'together'")] == others
    assert str(client.get_model_version_by_alias("together", "portable").version) == others[0]
    assert len(uploads(projection, str(item.artifact))) == 1


def test_a_damaged_artifact_is_not_registered(projection: Projection, artifact: Artifact, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(artifact.manifest.to_bytes())
    with pytest.raises(IntegrityError, match="missing"):
        registered(projection, outcome("damaged", artifact="sha256:" + 64 * "6"), Artifact.read(tmp_path))
    assert not projection.client.search_registered_models("name = 'damaged'")


def alias_of(projection: Projection, name: str, device_class: str) -> str:
    return str(projection.client.get_model_version_by_alias(name, device_class).version)


def test_a_class_that_keeps_eager_is_served_by_the_portable_artifact(projection: Projection, artifact: Artifact) -> None:
    item = outcome("kept", artifact="sha256:" + 64 * "7")
    kept = replace(item, device_class="cpu-x86-64-v3", verdict="kept-eager")
    assert alias(projection.client, kept) is None, "there is nothing yet to point to"
    version = registered(projection, item, artifact)
    assert alias(projection.client, kept) is True
    assert alias(projection.client, kept) is False
    assert alias_of(projection, "kept", "cpu-x86-64-v3") == version


def test_what_serves_a_class_that_keeps_eager_is_registered_as_what_it_is(projection: Projection, artifact: Artifact) -> None:
    kept = outcome("kept.alone", artifact="sha256:" + 64 * "8", device_class="cpu-x86-64-v3", verdict="kept-eager", recipe=None)
    version = registered(projection, kept, artifact)
    assert alias_of(projection, "kept.alone", "cpu-x86-64-v3") == version
    found = projection.client.get_model_version("kept.alone", version)
    assert found.tags["coldpress.device_class"] == "portable"
    (upload,) = uploads(projection, str(kept.artifact))
    assert (upload.name, upload.params["recipe"]) == ("kept-alone-portable", "portable")


def test_an_alias_never_goes_back_to_an_older_version_of_the_store(projection: Projection, artifact: Artifact) -> None:
    old, new = outcome("forward", artifact="sha256:" + 64 * "9"), outcome("forward", artifact="sha256:" + 64 * "b", version=4)
    first, second = registered(projection, old, artifact), registered(projection, new, artifact)
    assert alias(projection.client, old) is False
    assert alias_of(projection, "forward", "portable") == second
    assert registered(projection, old, artifact) == first
    assert alias_of(projection, "forward", "portable") == second
    again = replace(old, version=5)  # the older artifact, carried into a newer version
    assert alias(projection.client, again) is True
    assert alias_of(projection, "forward", "portable") == first
    assert projection.client.get_model_version("forward", first).tags["coldpress.version"] == "5"
    assert alias(projection.client, new) is False
    assert alias_of(projection, "forward", "portable") == first
    elsewhere = replace(old, artifact="sha256:" + 64 * "c", version=1)
    other = registered(projection, elsewhere, artifact, store_uri="another")
    assert alias_of(projection, "forward", "portable") == other, "versions of different stores have no order"


def test_a_model_is_registered_under_the_name_and_with_the_tags_of_its_entry(projection: Projection, artifact: Artifact) -> None:
    given = {"team": "risk", "a=b": "1", "/root": "2", "mlflow.runName": "mine", "coldpress.artifact": "mine", "long": "x" * 5000}
    name = """Joe's "best" model-frozen"""
    item = outcome("joe", artifact="sha256:" + 64 * "d", registered_name=name, tags=given)
    for _ in range(2):
        run_id = projection.log_outcome(item, artifact.manifest)
        version = registered(projection, item, artifact, run_id=run_id)
    expected = {"team": "risk", "a_b": "1", "_root": "2", "mlflow_runName": "mine", "coldpress.artifact": str(item.artifact)}
    found = projection.client.get_model_version(name, version)
    assert (version, found.run_id) == ("1", run_id)
    assert expected.items() <= found.tags.items()
    assert len(found.tags["long"]) == 1000
    run = projection.client.get_run(run_id)
    assert expected.items() <= run.data.tags.items()
    assert run.info.run_name == "joe · portable · portable"
    assert not projection.client.search_registered_models("name = 'joe'")


def test_by_reference_the_artifact_stays_in_its_store(projection: Projection, artifact: Artifact, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    version = store.publish("referred", source_key="k", artifacts={"portable": artifact}, carried={})
    item = outcome("referred", artifact=str(version.images["portable"]["digest"]), version=version.number)
    registered(projection, item, artifact, mode="reference", store_uri=str(store.root))
    (upload,) = uploads(projection, str(item.artifact))
    folder = Path(upload.artifact_location.removeprefix("file://")) / "artifact"
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "store.json"]
    model = mlflow.pyfunc.load_model("models:/referred@portable")
    assert model.predict(X).shape == (2, 3)
    changed = replace(artifact.manifest, provenance={"source": "another"}, version=version.number)
    (folder / "manifest.json").write_bytes(changed.to_bytes())
    with pytest.raises(IntegrityError, match="register it again"):
        mlflow.pyfunc.load_model("models:/referred@portable")
