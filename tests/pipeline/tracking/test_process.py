"""The tracker in a process of its own: same result as in the driver, no waiting, no leftovers."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking._model_registry.client import ModelRegistryClient

from freezer.artifact import Artifact
from freezer.errors import IntegrityError
from freezer.store import Store
from pipeline.records import Failure, Outcome
from pipeline.tracking import CampaignEnd, CampaignStart, TrackerProcess
from pipeline.tracking.process import AHEAD
from pipeline.workspace.machine_time import alone
from tests.conftest import Frozen
from tests.support.campaigns import run_judged
from tests.support.shown import empty_database, shown, without_ids
from tests.support.steps import HERE

ROOT = Path(__file__).parents[3]


def outcome(model: str) -> Outcome:
    return Outcome(
        model=model,
        device_class=HERE,
        verdict="failed",
        failure=Failure(kind="capture", message="no graph"),
        reason="no graph",
        num_threads=1,
        source="python:m:f",
        source_key="s",
        judge_key=model,
    )


def run_names(uri: str) -> set[str]:
    return {run["info"]["run_name"] for run in shown(uri)["runs"].values()}


def wait_until(holds: Callable[[], object], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_process_logs_the_same_as_a_tracker(
    template: Path, tmp_path: Path, scripted: Frozen, portable: Frozen
) -> None:
    artifacts: dict[str, Artifact] = {HERE: scripted.artifact, "portable": portable.artifact}
    found = {}
    for apart in (False, True):
        uri = empty_database(
            template, tmp_path / "mlflow"
        )  # same paths in both cases: tags name the store
        store = Store.open(str(tmp_path / "store"), create=True)
        report = run_judged(store, uri, "together", artifacts, apart=apart)
        assert report.infrastructure == ()
        found[apart] = without_ids(shown(uri))
        subprocess.run(["rm", "-rf", str(store.root)], check=True)
    assert found[False]["aliases"]["first"].keys() == {HERE, "portable"}
    assert found[True] == found[False]


def test_a_race_for_an_alias_is_repeated(
    template: Path,
    tmp_path: Path,
    scripted: Frozen,
    portable: Frozen,
    monkeypatch: pytest.MonkeyPatch,
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
    uri = empty_database(template, tmp_path / "mlflow")
    store = Store.open(str(tmp_path / "store"), create=True)
    report = run_judged(
        store, uri, "raced", {HERE: scripted.artifact, "portable": portable.artifact}
    )
    assert report.infrastructure == ()
    assert raced
    assert shown(uri)["aliases"]["first"].keys() == {HERE, "portable"}


def test_nothing_is_written_while_a_judge_measures(uri: str, store: Store) -> None:
    with TrackerProcess(uri, "quiet", str(store.root), mode="copy") as tracker:
        held = ExitStack()
        held.enter_context(alone())
        tracker.start(CampaignStart(catalog="catalog.yaml", started=1.0))
        tracker.log([outcome("a")])
        time.sleep(1)
        assert shown(uri)["runs"] == {}
        assert (tracker.num_logged, tracker.num_unlogged) == (0, 1)
        held.close()
        wait_until(lambda: tracker.num_logged == 1)
        assert len(run_names(uri)) == 2
        held.enter_context(alone())
        tracker.log([outcome("b")])
        tracker.finish([outcome("a"), outcome("b")], CampaignEnd(exit_code=1, finished=2.0))
        held.close()
    assert len(run_names(uri)) == 3
    assert tracker.failures == ()


def test_full_queue_is_logged_while_a_judge_waits(
    uri: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge may wait for the driver, which waits for room in the queue."""
    monkeypatch.setattr("pipeline.tracking.process.AHEAD", 1)
    with alone(), TrackerProcess(uri, "full", str(store.root), mode="copy") as tracker:
        tracker.start(CampaignStart(catalog="catalog.yaml", started=1.0))
        for name in "abc":
            tracker.log([outcome(name)])
        wait_until(lambda: tracker.num_logged > 0)


def test_signals_meant_for_the_driver_are_ignored(uri: str, store: Store) -> None:
    outcomes = [outcome(f"m{number}") for number in range(3)]
    with TrackerProcess(uri, "signals", str(store.root), mode="copy") as tracker:
        tracker.start(CampaignStart(catalog="catalog.yaml", started=1.0))
        wait_until(lambda: len(run_names(uri)) == 1)
        for number in (signal.SIGINT, signal.SIGTERM):
            tracker._process.send_signal(number)
        tracker.finish(outcomes, CampaignEnd(exit_code=130, interrupted=True, finished=2.0))
    assert tracker.failures == ()
    (run,) = shown(uri)["runs"].values()
    assert run["data"]["metrics"]["outcomes/total"] == len(outcomes)


def test_a_killed_process_is_reported_with_the_replay(uri: str, store: Store) -> None:
    with TrackerProcess(uri, "killed", str(store.root), mode="copy") as tracker:
        tracker.start(CampaignStart(catalog="catalog.yaml", started=1.0))
        wait_until(lambda: len(run_names(uri)) == 1)
        tracker._process.kill()
        for number in range(2 * AHEAD):
            tracker.log([outcome(f"m{number}")])
        tracker.finish([], CampaignEnd(exit_code=0, finished=2.0))
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
    driver = subprocess.run(
        [sys.executable, "-c", code, uri, str(store.root)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    number = int(driver.stdout)
    wait_until(
        lambda: (
            not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE
        )
    )
    (left,) = (tmp_path / "temporary").iterdir()
    with TrackerProcess(uri, "next", str(store.root), mode="copy") as tracker:
        process = psutil.Process(tracker._process.pid)
        # Popen returns before the kernel shows the environment of the new program.
        wait_until(process.environ)
        mine = Path(process.environ()["TMPDIR"])
        assert list((tmp_path / "temporary").iterdir()) == [mine] != [left]
    assert list((tmp_path / "temporary").iterdir()) == []


def test_the_next_start_registers_what_failed(
    uri: str, store: Store, scripted: Frozen, portable: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts = {HERE: scripted.artifact, "portable": portable.artifact}
    with monkeypatch.context() as broken:

        def refuse(*_: object, **__: object) -> None:
            raise IntegrityError("the artifact is damaged")

        broken.setattr("pipeline.tracking.registry.Registration.register", refuse)
        assert run_judged(store, uri, "told", artifacts).infrastructure
    assert shown(uri)["aliases"] == {}
    assert run_judged(store, uri, "told", artifacts).infrastructure == ()
    assert shown(uri)["aliases"]["first"].keys() == {HERE, "portable"}
