"""A store, a ledger and an MLflow database of an earlier release still load, verify, replay and
resume.

tests/golden/campaign.tgz is a finished campaign, `jobs.optimize catalog.yaml --campaign golden`, of
one model for cpu-x86-64-v3 and
portable, run in /campaign with torch 2.13.0. It is never written again: it represents the stores of
users."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import freezer
from freezer.hardware import detect
from freezer.store import Store
from pipeline.ledger import Ledger
from pipeline.records import Outcome
from tests.support.campaign_runs import environment, outcomes
from tests.support.commands import output
from tests.support.raylets import ROOT

GOLDEN = Path(__file__).parents[1] / "golden" / "campaign.tgz"
WRITTEN_IN = "/campaign"
PLACES = {
    "experiments": "artifact_location",
    "runs": "artifact_uri",
    "logged_models": "artifact_location",
    "logged_model_tags": "tag_value",
    "model_versions": "storage_location",
    "model_version_tags": "value",
}
"""Columns of MLflow's tables that hold paths."""


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The campaign, moved into a folder of this test."""
    folder = tmp_path_factory.mktemp("golden")
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(folder, filter="data")
    with sqlite3.connect(folder / "mlflow.db") as database:
        for table, column in PLACES.items():
            database.execute(
                f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (WRITTEN_IN, str(folder))
            )
    database.close()
    return folder


def python(folder: Path, *arguments: str) -> str:
    """Run Python in the campaign's folder, and return its output."""
    environ = environment(folder) | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    return output(sys.executable, "-W", "ignore", *arguments, env=environ, cwd=folder)


@pytest.mark.parametrize("device_class", ["portable", "cpu-x86-64-v3"])
def test_artifacts_load_and_verify(campaign: Path, device_class: str) -> None:
    if device_class not in detect().classes and device_class != "portable":
        pytest.skip(f"this machine does not run {device_class}")
    store = str(campaign / "store")
    model = freezer.load("tiny", store=store, device_class=device_class, threads=1, limit_isa=True)
    assert model(torch.ones(2, 16)).shape == (2, 16)
    assert freezer.verify("tiny", store=store, device_class="portable").num_files > 0


def test_mlflow_loads_the_registered_model(campaign: Path) -> None:
    code = (
        "import mlflow, numpy\n"
        "mlflow.set_tracking_uri('sqlite:///mlflow.db')\n"
        "model = mlflow.pyfunc.load_model('models:/tiny@portable')\n"
        "print(numpy.shape(model.predict({'input': numpy.ones((2, 16), dtype='float32')})))"
    )
    assert python(campaign, "-c", code).splitlines()[-1:] == ["(2, 16)"]


def test_ledger_keeps_its_outcomes(campaign: Path) -> None:
    with Ledger(Store.open(str(campaign / "store")), "golden", print, read_only=True) as ledger:
        rows = [
            ledger.nearest("outcome", "tiny", device_class)
            for device_class in ("cpu-x86-64-v3", "portable")
        ]
    stored = [row.data["outcome"] for row in rows if row is not None]
    assert [outcome["verdict"] for outcome in stored] == ["published", "published"]
    written = json.loads(json.dumps([Outcome.from_json(row).to_json() for row in stored]))
    for outcome in stored:
        for candidate in outcome["candidates"]:
            assert candidate.pop("migration") is None, "removed since"
    assert written == stored, "the layout is unchanged"


def runs_of(folder: Path) -> list[tuple[Any, ...]]:
    query = "SELECT run_uuid, name, status, end_time FROM runs ORDER BY run_uuid"
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:
        return database.execute(query).fetchall()


def test_replay_adds_no_runs(campaign: Path) -> None:
    before = runs_of(campaign)
    places = ("--store", "./store", "--tracking-uri", "sqlite:///mlflow.db")
    python(campaign, "-c", "from jobs.results import replay_app; replay_app()", "golden", *places)
    assert runs_of(campaign) == before


@pytest.mark.cluster
@pytest.mark.slow
def test_campaign_resumes(campaign: Path) -> None:
    """Recipes and judges have changed since, so all is built and judged again, and the next version
    published.
    """
    command = ("jobs.optimize", "catalog.yaml", "--campaign", "golden", "--json", "out.json")
    python(campaign, "-m", *command)
    found = outcomes(campaign)
    assert set(found) == {("tiny", "cpu-x86-64-v3"), ("tiny", "portable")}
    for outcome in found.values():
        ending = (outcome["verdict"], outcome["cached"], outcome["version"])
        assert ending == ("published", False, 2)
