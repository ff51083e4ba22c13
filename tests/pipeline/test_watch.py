"""Watching a real registry on a real local Ray: new versions, removed models, MLflow out of reach,
signals and kill -9.
"""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from mlflow import MlflowClient
from mlflow.models import infer_signature

from freezer.hardware import PORTABLE
from freezer.store import Store
from tests.support.campaign_runs import environment, outcomes, wait_for
from tests.support.shown import shown

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


class Registry:
    """A registry whose versions share the files of one model."""

    def __init__(self, uri: str, folder: Path) -> None:
        self.client = MlflowClient(uri, uri)
        mlflow.set_tracking_uri(uri)
        experiment = self.client.create_experiment(
            "sources", artifact_location=(folder / "sources").as_uri()
        )
        model, x = torch.nn.Linear(16, 16).eval(), torch.randn(2, 16)
        signature = infer_signature(x.numpy(), model(x).detach().numpy())
        with mlflow.start_run(experiment_id=experiment) as run:
            info = mlflow.pytorch.log_model(
                model, name="model", signature=signature, input_example=x.numpy()
            )
        self.run_id = run.info.run_id
        self.source = self.client.get_logged_model(info.model_id).artifact_location

    def register(self, name: str) -> None:
        """Add a version of a model."""
        if not self.client.search_registered_models(f"name = '{name}'"):
            self.client.create_registered_model(name)
        self.client.create_model_version(name, self.source, self.run_id)


@pytest.fixture
def registry(uri: str, tmp_path: Path) -> Registry:
    found = Registry(uri, tmp_path)
    found.register("changing")
    found.register("still")
    return found


WATCHING = "watching mlflow: every 1 s"


@contextmanager
def watching(folder: Path, uri: str) -> Iterator[subprocess.Popen[str]]:
    """`jobs.optimize --watch` for the portable class, which is judged by drift alone and thus
    quick.
    """
    command = [sys.executable, "-u", "-m", "jobs.optimize", "mlflow:", "--device-class", PORTABLE]
    command += ["--store", "store", "--tracking-uri", uri, "--json", "out.json"]
    command += ["--watch", "1", "--verbose"]
    with subprocess.Popen(
        command, env=environment(folder), cwd=folder, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def worked_on(text: str) -> list[str]:
    """The models of the builds and judges that a log names."""
    lines = [line.split() for line in text.splitlines()]
    return [words[2] for words in lines if words[1:2] in (["build"], ["judge"])]


def check_versions(folder: Path) -> None:
    """Check that only the changing model has a second version."""
    versions = {model: outcome["version"] for (model, _), outcome in outcomes(folder).items()}
    assert versions == {"changing": 2, "still": 1}


def runs_of(uri: str, model: str) -> dict[str, Any]:
    """The runs of a model by id."""
    runs = shown(uri)["runs"].items()
    return {key: run for key, run in runs if run["data"]["tags"].get("coldpress.model") == model}


@contextmanager
def locked(uri: str) -> Iterator[None]:
    """Lock the database of MLflow."""
    with sqlite3.connect(uri.removeprefix("sqlite:///"), isolation_level=None) as database:
        database.execute("BEGIN EXCLUSIVE")
        yield
        database.execute("ROLLBACK")


def test_new_versions_are_frozen_and_others_left_alone(
    registry: Registry, uri: str, tmp_path: Path
) -> None:
    with watching(tmp_path, uri) as process:
        wait_for(process, WATCHING)
        before = runs_of(uri, "still")
        assert before
        registry.register("changing")
        registry.client.delete_registered_model(
            "still-frozen"
        )  # what a pass would repair if it looked at this model
        assert worked_on(wait_for(process, WATCHING)) == ["changing"] * 2
        assert runs_of(uri, "still") == before
        models = {model.name for model in registry.client.search_registered_models()}
        assert "still-frozen" not in models
        check_versions(tmp_path)
        registry.client.delete_registered_model("still")
        wait_for(process, "no longer in the registry: still; their artifacts stay")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130
    assert Store.open(str(tmp_path / "store")).versions("still") == [1]


def test_watch_survives_mlflow_and_its_own_death(
    registry: Registry, uri: str, tmp_path: Path
) -> None:
    with watching(tmp_path, uri) as process:
        wait_for(process, WATCHING)
        with locked(uri):
            wait_for(process, "trying again every 1 s")
            time.sleep(15)  # two more looks, of PROBE_S each
        assert wait_for(process, "MLflow answers again").count("\n") == 1, "reported once"
        process.send_signal(signal.SIGKILL)
    registry.register("changing")
    with watching(tmp_path, uri) as process:
        assert worked_on(wait_for(process, WATCHING)) == ["changing"] * 2
    assert not outcomes(tmp_path)["still", PORTABLE]["cached"], "reached by this campaign"


def test_mlflow_failing_in_a_pass_is_made_up_for(
    registry: Registry, uri: str, tmp_path: Path
) -> None:
    """The database locks when the new version is being built: it is published, and logged in a
    later pass.
    """
    with watching(tmp_path, uri) as process:
        wait_for(process, WATCHING)
        registry.register("changing")
        wait_for(process, " build changing ")
        with locked(uri):
            wait_for(process, "brings MLflow up to date")
            assert Store.open(str(tmp_path / "store")).versions("changing") == [1, 2]
            assert not process.poll()
        wait_for(process, WATCHING)
        wait_for(process, WATCHING)
        registered = registry.client.get_model_version_by_alias("changing-frozen", PORTABLE)
        assert registered.tags["coldpress.version"] == "2"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130


def test_an_interrupted_pass_is_continued(registry: Registry, uri: str, tmp_path: Path) -> None:
    with watching(tmp_path, uri) as process:
        wait_for(process, WATCHING)
        registry.register("changing")
        wait_for(process, " build changing ")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert Store.open(str(tmp_path / "store")).versions("changing") == [1]
    with watching(tmp_path, uri) as process:
        wait_for(process, WATCHING)
        check_versions(tmp_path)
