"""Replay: MLflow is restored from the ledger, and a second replay changes nothing."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from typer.testing import Result

from freezer.artifact import Artifact, GateRecord
from freezer.spec import Limits
from freezer.store import Store
from jobs.results import replay_app as app
from pipeline.ledger import campaign_lock
from tests.support.campaigns import MODELS, run_judged
from tests.support.commands import finished, invoked
from tests.support.past_outcomes import BAD, DOWN
from tests.support.raylets import ROOT
from tests.support.shown import empty_database, shown, without_ids
from tests.support.steps import HERE, blob_of


def replayed(store: Store, uri: str, *arguments: str) -> Result:
    return invoked(app, *arguments, "--store", store.root, "--tracking-uri", uri)


def parent_of(uri: str, campaign: str) -> Any:
    (run,) = MlflowClient(uri).search_runs(
        [MlflowClient(uri).get_experiment_by_name("coldpress").experiment_id],
        f"tags.`coldpress.campaign` = '{campaign}' AND tags.`coldpress.kind` = 'campaign'",
    )
    return run


def summary_of(uri: str, campaign: str) -> list[tuple[str, str, str, bool]]:
    """Model, class, verdict and cached of every row of the summary, and the figures are there."""
    client, run_id = MlflowClient(uri), parent_of(uri, campaign).info.run_id
    assert {item.path for item in client.list_artifacts(run_id)} == {
        "summary.json",
        "report.html",
    }
    table = json.loads(Path(client.download_artifacts(run_id, "summary.json")).read_text())
    return [tuple(row[:4]) for row in table["data"]]


ALL = [
    ("first", HERE, "published", False),
    ("first", "portable", "published", False),
    ("kept", HERE, "kept-eager", False),
    ("kept", "portable", "published", False),
    ("gone", HERE, "failed", False),
    ("gone", "portable", "failed", False),
]


# MLflow was down, died or lost its data


def test_replay_logs_a_campaign_that_ran_without_mlflow(
    store: Store, uri: str, artifacts: dict[str, Artifact]
) -> None:
    report = run_judged(store, DOWN, "down", artifacts, problems=(BAD,))
    assert report.exit_code == 3
    assert store.versions("first") == store.versions("kept") == [1]
    (failure,) = report.infrastructure
    assert (
        f"`coldpress replay down --store {store.root} --tracking-uri {DOWN}` brings MLflow up"
        " to date" in failure
    )
    done = replayed(store, uri, "down")
    assert (done.exit_code, done.stdout) == (
        0,
        "campaign down: MLflow shows 6 outcomes\n",
    ), done.stderr
    found = shown(uri)
    assert found["aliases"] == {"first": {HERE: 2, "portable": 1}, "kept": {HERE: 1, "portable": 1}}
    assert len(found["runs"]) == 1 + 6
    parent = parent_of(uri, "down")
    assert (parent.info.status, parent.info.start_time) == ("FINISHED", 1_700_000_000_000)
    assert parent.data.params["catalog"] == "catalog.yaml"
    assert summary_of(uri, "down") == [*ALL, ("bad", "auto", "failed", False)]


def test_a_lost_database_is_restored(
    store: Store, uri: str, artifacts: dict[str, Artifact], template: Path, tmp_path: Path
) -> None:
    tags = {"team": "risk", "coldpress.source_model": "Joe's"}
    name = "Joe's-frozen"
    run_judged(
        store, uri, "lost", artifacts, problems=(BAD,), tags=tags, registered_name=name, apart=True
    )
    before = shown(uri)
    assert set(before["aliases"]) == {name}
    assert all(found["team"] == "risk" for found in before["versions"].values())
    again = empty_database(template, tmp_path / "again")
    assert replayed(store, again, "lost").exit_code == 0
    assert without_ids(shown(again)) == without_ids(before)
    assert parent_of(again, "lost").info.end_time == parent_of(uri, "lost").info.end_time
    assert summary_of(again, "lost") == summary_of(uri, "lost")


# The driver was killed or interrupted


def test_a_killed_campaign_shows_its_final_outcomes(
    store: Store, uri: str, artifacts: dict[str, Artifact]
) -> None:
    folders = [f"{name}={artifact.folder}" for name, artifact in artifacts.items()]
    module = [sys.executable, "-W", "ignore", "-m", "tests.support.campaigns"]
    done = finished(*module, store.root, DOWN, "killed", "3", *folders, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert replayed(store, uri, "killed").stdout.startswith(
        "campaign killed: MLflow shows 2 outcomes"
    )
    assert summary_of(uri, "killed") == ALL[:2]
    assert parent_of(uri, "killed").info.status == "KILLED"
    before = shown(uri)
    assert replayed(store, uri, "killed").exit_code == 0
    assert shown(uri) == before
    run_judged(store, uri, "killed", artifacts)
    assert summary_of(uri, "killed") == ALL, "what it had reached before is its own, not taken over"
    assert before["runs"].keys() < shown(uri)["runs"].keys(), "the runs that were there are kept"


# Several campaigns


def test_a_rollback_stays_in_mlflow(store: Store, uri: str, artifacts: dict[str, Artifact]) -> None:
    run_judged(store, DOWN, "one", artifacts)
    before = store.version("first").images["portable"].digest
    changed = {**artifacts, "portable": stricter(artifacts["portable"])}
    run_judged(store, DOWN, "two", changed, limits=Limits(error_ratio_max=2.5))
    store.roll_back("first", 1)
    assert replayed(store, uri, "--all").exit_code == 0
    found = shown(uri)
    served = {
        name: found["versions"][name, found["aliases"][name]["portable"]]["coldpress.artifact"]
        for name in ("first", "kept")
    }
    assert served == {"first": before, "kept": store.version("kept").images["portable"].digest}
    store.publish(
        "first",
        source_key="sha256:" + "9" * 64,
        artifacts=[artifacts[HERE]],
        carried=store.version("first").images_of("portable"),
    )
    assert (store.version("first").number, store.version("first").images["portable"].digest) == (
        3,
        before,
    )
    assert replayed(store, uri, "--all").exit_code == 0
    assert shown(uri)["aliases"] == found["aliases"], (
        "version 3 carries the artifact that was rolled back to"
    )
    store.roll_back("first", 2)
    assert replayed(store, uri, "--all").exit_code == 0
    assert shown(uri)["aliases"]["first"]["portable"] != found["aliases"]["first"]["portable"], (
        "the store serves version 2 again"
    )


def stricter(artifact: Artifact) -> Artifact:
    return Artifact(
        folder=artifact.folder,
        manifest=replace(artifact.manifest, gate=GateRecord(error_ratio_max=2, speedup_min=1)),
    )


# Messages and exit codes


def test_a_running_campaign_is_skipped(
    store: Store, uri: str, artifacts: dict[str, Artifact]
) -> None:
    for name in ("one", "two"):
        run_judged(store, DOWN, name, artifacts, models={"gone": MODELS["gone"]})
    with campaign_lock(store, "one"):
        refused = replayed(store, uri, "one")
        assert (refused.exit_code, "is being run by another driver" in refused.stderr) == (3, True)
        done = replayed(store, uri, "--all")
    assert done.exit_code == 0
    assert "campaign one is skipped" in done.stdout
    assert "campaign two: MLflow shows 2 outcomes" in done.stdout


def test_unreachable_mlflow_or_store_exits_with_3(
    store: Store, artifacts: dict[str, Artifact], tmp_path: Path
) -> None:
    for name in ("one", "two"):
        run_judged(store, DOWN, name, artifacts, models={"gone": MODELS["gone"]})
    done = replayed(store, DOWN, "--all")
    assert done.exit_code == 3
    assert done.stdout.count("MLflow at http://127.0.0.1:9 failed") == 1, (
        "the second campaign is not tried"
    )
    gone = invoked(app, "one", "--store", tmp_path / "nowhere")
    assert (gone.exit_code, "is not there" in gone.stderr) == (3, True)


def test_a_damaged_artifact_fails_alone(
    store: Store, uri: str, artifacts: dict[str, Artifact]
) -> None:
    run_judged(store, DOWN, "damaged", artifacts)
    payload = artifacts[HERE].manifest.payloads[0]
    blob = blob_of(store.root / "first", payload.digest)
    blob.chmod(0o644)
    blob.write_bytes(b"x" * payload.size_bytes)
    done = replayed(store, uri, "damaged")
    assert done.exit_code == 3
    assert "MLflow is incomplete" in done.stdout
    assert shown(uri)["aliases"] == {"first": {"portable": 1}, "kept": {HERE: 1, "portable": 1}}
    assert summary_of(uri, "damaged") == ALL
