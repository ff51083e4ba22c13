"""The tracker in a process of its own: same result as in the driver, no waiting, no leftovers."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking._model_registry.client import ModelRegistryClient

from freezer.artifact import Artifact
from freezer.errors import IntegrityError
from freezer.store import Store
from pipeline.ledger import CampaignRecord
from pipeline.tracking import TrackerProcess
from pipeline.tracking.process import AHEAD
from pipeline.workspace.machine_time import alone
from tests.support.campaigns import run_judged
from tests.support.commands import finished
from tests.support.outcomes import failed
from tests.support.raylets import ROOT, wait_until
from tests.support.shown import shown
from tests.support.steps import HERE

STARTED = CampaignRecord(catalog="catalog.yaml", started=1.0)


def run_names(uri: str) -> set[str]:
    return {run["info"]["run_name"] for run in shown(uri)["runs"].values()}


def test_a_race_for_an_alias_is_repeated(
    uri: str, store: Store, artifacts: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two campaigns that register one model at the same moment; the server reports the database's
    error to one of them.
    """
    original, raced = ModelRegistryClient.set_registered_model_alias, list[str]()

    def racing(self: ModelRegistryClient, name: str, alias: str, version: str) -> None:
        if alias not in raced:
            raced.append(alias)
            raise MlflowException(
                "(sqlite3.IntegrityError) UNIQUE constraint failed: registered_model_aliases.alias"
            )
        original(self, name, alias, version)

    monkeypatch.setattr(ModelRegistryClient, "set_registered_model_alias", racing)
    assert run_judged(store, uri, "raced", artifacts).infrastructure == ()
    assert raced
    assert shown(uri)["aliases"]["first"].keys() == {HERE, "portable"}


def test_nothing_is_written_while_a_judge_measures(uri: str, store: Store) -> None:
    with TrackerProcess(uri, "quiet", str(store.root), mode="copy") as tracker:
        held = ExitStack()
        held.enter_context(alone())
        tracker.start(STARTED)
        tracker.log([failed("a")])
        time.sleep(1)
        assert shown(uri)["runs"] == {}
        assert (tracker.num_logged, tracker.num_unlogged) == (0, 1)
        held.close()
        wait_until(lambda: tracker.num_logged == 1, "a is logged")
        assert len(run_names(uri)) == 2
        held.enter_context(alone())
        tracker.log([failed("b")])
        tracker.finish([failed("a"), failed("b")], replace(STARTED, exit_code=1, finished=2.0))
        held.close()
    assert len(run_names(uri)) == 3
    assert tracker.failures == ()


def test_full_queue_is_logged_while_a_judge_waits(
    uri: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge may wait for the driver, which waits for room in the queue."""
    monkeypatch.setattr("pipeline.tracking.process.AHEAD", 1)
    with alone(), TrackerProcess(uri, "full", str(store.root), mode="copy") as tracker:
        tracker.start(STARTED)
        for name in "abc":
            tracker.log([failed(name)])
        wait_until(lambda: tracker.num_logged > 0, "one is logged")


def test_signals_meant_for_the_driver_are_ignored(uri: str, store: Store) -> None:
    outcomes = [failed(f"m{number}") for number in range(3)]
    with TrackerProcess(uri, "signals", str(store.root), mode="copy") as tracker:
        tracker.start(STARTED)
        wait_until(lambda: len(run_names(uri)) == 1, "it has started")
        for number in (signal.SIGINT, signal.SIGTERM):
            tracker._process.send_signal(number)
        tracker.finish(outcomes, replace(STARTED, exit_code=130, interrupted=True, finished=2.0))
    assert tracker.failures == ()
    (run,) = shown(uri)["runs"].values()
    assert run["data"]["metrics"]["outcomes/total"] == len(outcomes)


def test_a_killed_process_is_reported_with_the_replay(uri: str, store: Store) -> None:
    with TrackerProcess(uri, "killed", str(store.root), mode="copy") as tracker:
        tracker.start(STARTED)
        wait_until(lambda: len(run_names(uri)) == 1, "it has started")
        tracker._process.kill()
        for number in range(2 * AHEAD):
            tracker.log([failed(f"m{number}")])
        tracker.finish([], replace(STARTED, exit_code=0, finished=2.0))
    assert (tracker.num_logged, tracker.num_unlogged) == (0, 2 * AHEAD), (
        "MLflow lacks them until a replay"
    )
    (failure,) = tracker.failures
    assert "ended with exit code -9; the store and the ledger are complete" in failure
    assert f"coldpress replay killed --store {store.root}" in failure


def test_a_killed_driver_ends_the_process_and_its_files(
    uri: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    code = (
        "import os, signal, sys\n"
        "from pipeline.tracking.process import TrackerProcess\n"
        "tracker = TrackerProcess(sys.argv[1], 'killed', sys.argv[2], mode='copy').__enter__()\n"
        "print(tracker._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    driver = finished(sys.executable, "-c", code, uri, store.root, cwd=ROOT)
    number = int(driver.stdout)
    wait_until(
        lambda: (
            not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE
        ),
        "the process ends",
    )
    (left,) = (tmp_path / "temporary").iterdir()
    with TrackerProcess(uri, "next", str(store.root), mode="copy") as tracker:
        process = psutil.Process(tracker._process.pid)
        # Popen returns before the kernel shows the environment of the new program.
        wait_until(process.environ, "its environment")
        mine = Path(process.environ()["TMPDIR"])
        assert list((tmp_path / "temporary").iterdir()) == [mine] != [left]
    assert list((tmp_path / "temporary").iterdir()) == []


def test_the_next_start_registers_what_failed(
    uri: str, store: Store, artifacts: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:

        def refuse(*_: object, **__: object) -> None:
            raise IntegrityError("the artifact is damaged")

        broken.setattr("pipeline.tracking.registry.Registration.register", refuse)
        assert run_judged(store, uri, "told", artifacts).infrastructure
    assert shown(uri)["aliases"] == {}
    assert run_judged(store, uri, "told", artifacts).infrastructure == ()
    assert shown(uri)["aliases"]["first"].keys() == {HERE, "portable"}
