"""Registered artifacts in a real sqlite MLflow; each test has its own campaign and models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from torch import nn

from freezer.artifact import Artifact
from freezer.errors import ContractError, IntegrityError
from freezer.store import Store
from pipeline.tracking.projection import Projection
from tests.support.outcomes import X, outcome
from tests.support.projections import registered


def alias_of(projection: Projection, name: str, device_class: str = "portable") -> str:
    return str(projection.client.get_model_version_by_alias(name, device_class).version)


def uploads(projection: Projection, digest: str) -> list[Any]:
    return list(
        projection.client.search_logged_models(
            [projection.experiment_id], f"tags.`coldpress.artifact` = '{digest}'"
        )
    )


def test_a_registered_artifact_loads_by_its_alias(
    projection: Projection, artifact: Artifact, source: nn.Module
) -> None:
    item = outcome("by.alias", artifact="sha256:" + 64 * "1")
    run_id = projection.log_outcome(item)
    registered(projection, item, artifact, run_id=run_id)
    found = projection.client.get_model_version_by_alias("by.alias", "portable")
    assert (found.version, found.run_id) == (1, run_id)
    expected = {
        "coldpress.artifact": item.artifact,
        "coldpress.version": "3",
        "coldpress.device_class": "portable",
        "coldpress.speedup": "2.00",
    }
    assert expected.items() <= found.tags.items()
    (output,) = projection.client.get_run(str(run_id)).outputs.model_outputs
    assert output.model_id == found.source.removeprefix("models:/")
    assert found.tags["coldpress.store"] == str(Path("store").absolute())
    model = mlflow.pyfunc.load_model("models:/by.alias@portable")
    answer = model.predict({"x": X})
    np.testing.assert_allclose(
        answer, source(torch.from_numpy(X)).detach().numpy(), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(model.predict(X), answer)
    assert model.get_raw_model().manifest.version == 3
    assert model.metadata.signature.inputs.inputs[0].shape == (-1, 4)
    with pytest.raises(ContractError):
        model.predict({"x": np.zeros((9, 4), np.float32)})


def test_a_registered_version_holds_the_whole_artifact(
    projection: Projection, artifact: Artifact
) -> None:
    item = outcome("whole", artifact="sha256:" + 64 * "2")
    registered(projection, item, artifact)
    (upload,) = uploads(projection, str(item.artifact))
    folder = Path(upload.artifact_location.removeprefix("file://"))
    whole = Artifact.read(folder / "artifact")
    whole.verify()
    assert whole.manifest == replace(artifact.manifest, version=3)
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert (folder / "artifact" / "evidence" / "all-captured-code.txt").is_file()


def test_an_alias_never_moves_to_an_older_version(
    projection: Projection, artifact: Artifact
) -> None:
    old, new = (
        outcome("forward", artifact="sha256:" + 64 * "9"),
        outcome("forward", artifact="sha256:" + 64 * "b", version=4),
    )
    registered(projection, old, artifact)
    registered(projection, new, artifact)
    registered(projection, old, artifact)
    assert alias_of(projection, "forward") == "2"
    registered(projection, replace(old, version=5), artifact)
    assert alias_of(projection, "forward") == "1", (
        "the older artifact, carried into a newer version"
    )
    assert projection.client.get_model_version("forward", "1").tags["coldpress.version"] == "5"
    registered(projection, new, artifact)
    assert alias_of(projection, "forward") == "1"
    registered(
        projection,
        replace(old, artifact="sha256:" + 64 * "c", version=1),
        artifact,
        store_uri="another",
    )
    assert alias_of(projection, "forward") == "3", "versions of different stores have no order"


def test_entries_set_the_registered_name_and_tags(
    projection: Projection, artifact: Artifact
) -> None:
    given = {
        "team": "risk",
        "a=b": "1",
        "/root": "2",
        "mlflow.runName": "mine",
        "coldpress.artifact": "mine",
        "long": "x" * 5000,
    }
    name = """Joe's "best" model-frozen"""
    item = outcome("joe", artifact="sha256:" + 64 * "d", registered_name=name, tags=given)
    for _ in range(2):
        run_id = projection.log_outcome(item)
        registered(projection, item, artifact, run_id=run_id)
    expected = {
        "team": "risk",
        "a_b": "1",
        "_root": "2",
        "mlflow_runName": "mine",
        "coldpress.artifact": str(item.artifact),
    }
    (found,) = projection.client.search_model_versions(f"name IN ({name!r})")
    assert found.run_id == run_id
    assert expected.items() <= found.tags.items()
    assert len(found.tags["long"]) == 1000
    run = projection.client.get_run(run_id)
    assert expected.items() <= run.data.tags.items()
    assert run.info.run_name == "joe · portable · portable"


def test_a_reference_leaves_the_artifact_in_its_store(
    projection: Projection, artifact: Artifact, tmp_path: Path
) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    version = store.publish("referred", source_key="k", artifacts=[artifact])
    item = outcome(
        "referred", artifact=str(version.images["portable"].digest), version=version.number
    )
    registered(projection, item, artifact, mode="reference", store_uri=str(store.root))
    (upload,) = uploads(projection, str(item.artifact))
    folder = Path(upload.artifact_location.removeprefix("file://")) / "artifact"
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "store.json"]
    assert mlflow.pyfunc.load_model("models:/referred@portable").predict(X).shape == (2, 3)
    changed = replace(artifact.manifest, provenance={"source": "another"}, version=version.number)
    (folder / "manifest.json").write_bytes(changed.to_bytes())
    with pytest.raises(IntegrityError):
        mlflow.pyfunc.load_model("models:/referred@portable")
