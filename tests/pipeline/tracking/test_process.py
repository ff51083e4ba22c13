"""The tracker's process: it shows what the tracker shows, holds nobody up, and ends with its driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient

from freezer.artifact.folder import Artifact
from freezer.errors import IntegrityError, UsageError
from freezer.store.store import Store
from pipeline.records.failure import Failure
from pipeline.records.outcome import Outcome
from pipeline.tracking.process import AHEAD, LOT, TrackerProcess
from tests.conftest import Frozen
from tests.pipeline.campaigns import run_judged
from tests.pipeline.shown import empty_database, shown, without_ids
from tests.steps import HERE

ROOT = Path(__file__).parents[3]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), create=True)


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


def test_it_shows_what_a_tracker_of_this_process_shows(template: Path, tmp_path: Path, scripted: Frozen, portable: Frozen) -> None:
    artifacts: dict[str, Artifact] = {HERE: scripted.artifact, "portable": portable.artifact}
    found = {}
    for apart in (False, True):
        uri = empty_database(template, tmp_path / "mlflow")  # at one place: the store's too, which tags of versions name
        store = Store.open(str(tmp_path / "store"), create=True)
        report = run_judged(store, uri, "together", artifacts, apart=apart)
        assert report.infrastructure == ()
        found[apart] = without_ids(shown(uri))
        subprocess.run(["rm", "-rf", str(store.root)], check=True)
    assert found[False]["aliases"]["first"].keys() == {HERE, "portable"}
    assert found[True] == found[False]


def test_nothing_is_written_while_a_judge_runs_where_the_driver_stands_until_the_campaign_ends(uri: str, store: Store) -> None:
    judging = True
    with TrackerProcess(uri, "quiet", str(store.root), mode="copy") as tracker:
        tracker.may_work = lambda: not judging
        tracker.start("catalog.yaml", 1.0)
        tracker.log([outcome("a")])
        time.sleep(1)
        assert shown(uri)["runs"] == {}
        judging = False
        wait_until(lambda: len(run_names(uri)) == 2)
        judging = True
        tracker.log([outcome("b")])
        tracker.finish([outcome("a"), outcome("b")], 1, interrupted=False, finished=2.0)
    assert len(run_names(uri)) == 3
    assert tracker.failures == ()


def test_the_driver_is_ahead_by_some_models_and_no_more(uri: str, store: Store) -> None:
    """As many as wait, one that is under way, and the start."""
    logged = 0
    with TrackerProcess(uri, "ahead", str(store.root), mode="copy") as tracker:
        tracker.may_work = lambda: logged > AHEAD
        tracker.start("catalog.yaml", 1.0)
        for number in range(AHEAD):
            tracker.log([outcome(f"m{number}")])
            logged += 1
        began = time.monotonic()
        logged += 1
        tracker.log([outcome("last")])  # has to wait until MLflow is open
        assert time.monotonic() - began > 0.1
        tracker.finish([], 0, interrupted=False, finished=2.0)
    assert len(run_names(uri)) == AHEAD + 2


def test_a_process_that_is_killed_is_told_with_what_brings_mlflow_up_to_date(uri: str, store: Store) -> None:
    with TrackerProcess(uri, "killed", str(store.root), mode="copy") as tracker:
        tracker.start("catalog.yaml", 1.0)
        wait_until(lambda: len(run_names(uri)) == 1)
        tracker._process.kill()
        for number in range(2 * AHEAD):  # nobody waits for what is not there
            tracker.log([outcome(f"m{number}")])
        tracker.finish([], 0, interrupted=False, finished=2.0)
    (failure,) = tracker.failures
    assert "was killed by SIGKILL; the store and the ledger are complete" in failure
    assert f"python -m jobs.replay killed --store {store.root}" in failure


def test_what_cannot_be_passed_on_is_told_with_what_brings_mlflow_up_to_date(uri: str, store: Store) -> None:
    with TrackerProcess(uri, "unsent", str(store.root), mode="copy") as tracker:
        tracker.start("catalog.yaml", 1.0)
        tracker.log([replace(outcome("a"), tags={"": lambda: None})])  # type: ignore[dict-item]
        tracker.finish([], 0, interrupted=False, finished=2.0)
    (failure,) = tracker.failures
    assert "cannot be talked to (" in failure
    assert f"python -m jobs.replay unsent --store {store.root}" in failure


def test_more_outcomes_than_are_handed_over_together_are_all_in_the_summary(uri: str, store: Store) -> None:
    outcomes = [outcome(f"m{number}") for number in range(2 * LOT + 1)]
    with TrackerProcess(uri, "many", str(store.root), mode="copy") as tracker:
        tracker.start("catalog.yaml", 1.0)
        tracker.finish(outcomes, 1, interrupted=False, finished=2.0)
    assert tracker.failures == ()
    (run,) = shown(uri)["runs"].values()
    assert run["data"]["metrics"]["outcomes/total"] == len(outcomes)


def test_a_campaign_that_breaks_off_leaves_no_process(uri: str, store: Store) -> None:
    with TrackerProcess(uri, "broken", str(store.root), mode="copy") as tracker:
        tracker.may_work = lambda: False
        tracker.start("catalog.yaml", 1.0)
    assert tracker._process.poll() is not None
    assert not tracker._thread.is_alive()
    assert tracker.failures == ()


def test_it_ends_with_a_driver_that_is_killed(uri: str, store: Store) -> None:
    code = (
        "import sys, time\n"
        "from pipeline.tracking.process import TrackerProcess\n"
        "with TrackerProcess(sys.argv[1], 'gone', sys.argv[2], mode='copy') as tracker:\n"
        "    print(tracker._process.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", code, uri, str(store.root)], stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ}
    )
    assert driver.stdout is not None
    child = psutil.Process(int(driver.stdout.readline()))
    driver.kill()
    driver.wait(30)
    driver.stdout.close()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_its_temporary_files_go_when_it_is_killed_and_when_its_driver_was(
    uri: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    code = (
        "import os, signal, sys\n"
        "from pipeline.tracking.process import TrackerProcess\n"
        "tracker = TrackerProcess(sys.argv[1], 'killed', sys.argv[2], mode='copy').__enter__()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, uri, str(store.root)], cwd=ROOT, check=False)
    (left,) = (tmp_path / "temporary").iterdir()
    with TrackerProcess(uri, "next", str(store.root), mode="copy") as tracker:
        mine = Path(psutil.Process(tracker._process.pid).environ()["TMPDIR"])
        (mine / "tmp123" / "artifact").mkdir(parents=True)
        assert list((tmp_path / "temporary").iterdir()) == [mine] != [left]
    assert list((tmp_path / "temporary").iterdir()) == []


def test_signals_that_are_meant_for_the_driver_do_not_end_it(uri: str, store: Store) -> None:
    with TrackerProcess(uri, "signals", str(store.root), mode="copy") as tracker:
        tracker.start("catalog.yaml", 1.0)
        wait_until(lambda: len(run_names(uri)) == 1)
        for number in (signal.SIGINT, signal.SIGTERM):
            tracker._process.send_signal(number)
        tracker.log([outcome("a")])
        tracker.finish([outcome("a")], 130, interrupted=True, finished=2.0)
    assert tracker.failures == ()
    assert len(run_names(uri)) == 2


def test_what_is_no_tracking_uri_is_refused_before_anything_starts(tmp_path: Path, store: Store) -> None:
    with pytest.raises(UsageError, match="is a folder, which MLflow no longer tracks to"):
        TrackerProcess(str(tmp_path), "folder", str(store.root), mode="copy")


def test_a_finished_campaign_asks_mlflow_for_nothing_but_its_own_run(
    uri: str, store: Store, scripted: Frozen, portable: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts = {HERE: scripted.artifact, "portable": portable.artifact}
    asked: list[str] = []

    def counted(name: str) -> None:
        method = getattr(MlflowClient, name)

        def ask(*args: Any, **named: Any) -> Any:
            asked.append(name)
            return method(*args, **named)

        monkeypatch.setattr(MlflowClient, name, ask)

    for name in ("search_runs", "search_model_versions", "get_registered_model", "create_run", "log_batch"):
        counted(name)
    run_judged(store, uri, "again", artifacts)
    first, before = len(asked), shown(uri)
    asked.clear()
    run_judged(store, uri, "again", artifacts)
    assert (first > 10, sorted(asked)) == (True, ["log_batch", "search_runs"]), "the parent run, and its new summary"
    assert shown(uri)["versions"] == before["versions"]
    assert without_ids(shown(uri))["aliases"] == without_ids(before)["aliases"]

    asked.clear()
    run_judged(store, uri, "again", artifacts, speedup_min=1.1)  # other keys: there is something to log
    assert len(asked) > 10


def test_what_mlflow_was_not_told_is_told_by_the_next_start(
    uri: str, store: Store, scripted: Frozen, portable: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts = {HERE: scripted.artifact, "portable": portable.artifact}
    with monkeypatch.context() as broken:

        def refuse(*_: object, **__: object) -> None:
            raise IntegrityError("the artifact is damaged")

        broken.setattr("pipeline.tracking.registry.Registry.register", refuse)
        assert run_judged(store, uri, "told", artifacts).infrastructure
    assert shown(uri)["aliases"] == {}
    assert run_judged(store, uri, "told", artifacts).infrastructure == ()
    assert shown(uri)["aliases"]["first"].keys() == {HERE, "portable"}
