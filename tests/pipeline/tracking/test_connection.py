"""Connecting to MLflow, creating its database, and MLflow as `coldpress doctor` finds it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from freezer.checks import CheckRequest, Finding
from freezer.errors import InfrastructureError, UsageError
from pipeline.ledger import CampaignRecord
from pipeline.tracking import list_registry
from pipeline.tracking.connection import check_mlflow, resolve
from pipeline.tracking.projection import Projection
from tests.support.raylets import LOOPBACK, free_port


def test_mlflow_that_does_not_answer(tmp_path: Path) -> None:
    address = f"{LOOPBACK}:{free_port()}"
    (tmp_path / "mlflow.db").write_text("this is no database" * 100)
    started = time.monotonic()
    for uri in (f"http://me:secret@{address}", f"sqlite:///{tmp_path}/mlflow.db"):
        with pytest.raises(InfrastructureError) as caught:
            Projection(uri, "c")
        found = finding(uri)
        assert (found.level, "secret@" in f"{caught.value}{found}") == ("error", False)
    with pytest.raises(InfrastructureError):
        list_registry(f"http://{address}", None, None)
    assert time.monotonic() - started < 30


def test_folders_are_rejected_and_passwords_hidden() -> None:
    with pytest.raises(UsageError):
        Projection("./mlruns", "folder")
    with pytest.raises(InfrastructureError) as caught:
        Projection("postgresql+missing://me:secret@127.0.0.1:1/mlflow", "secret")
    assert "me:secret@" not in str(caught.value)
    assert "//127.0.0.1:1/mlflow" in str(caught.value)


def test_a_relative_database_path_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve("sqlite:///sub/mlflow.db") == f"sqlite:///{tmp_path}/sub/mlflow.db"
    assert resolve(f"sqlite:///{tmp_path}/mlflow.db") == f"sqlite:///{tmp_path}/mlflow.db"
    assert resolve("http://host:5000") == "http://host:5000"


@pytest.mark.slow
def test_a_killed_database_creation_is_repeated(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    code = (
        "import sys; from pipeline.tracking.projection import Projection;"
        " Projection(sys.argv[1], 'killed')"
    )
    maker = subprocess.Popen([sys.executable, "-c", code, uri], start_new_session=True)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in tmp_path.glob(".mlflow.db.*/mlflow.db")):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.killpg(maker.pid, signal.SIGKILL)
    assert maker.wait(30) == -signal.SIGKILL
    assert not (tmp_path / "mlflow.db").exists()
    projection = Projection(uri, "next")
    projection.start(CampaignRecord(catalog="catalog.yaml", started=1.0))


@pytest.mark.slow
def test_concurrent_processes_create_one_database(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pipeline.ledger import CampaignRecord\n"
        "from pipeline.tracking.projection import Projection\n"
        "p = Projection(sys.argv[1], sys.argv[2])\n"
        "p.start(CampaignRecord(catalog='c', started=0.0)); print(p.experiment_id)\n"
    )
    command = [sys.executable, "-c", code, f"sqlite:///{tmp_path}/mlflow.db"]
    started = [
        subprocess.Popen([*command, f"camp-{i}"], stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    found = [process.communicate(timeout=120)[0].split()[-1] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert found[0] == found[1]
    assert not (tmp_path / "mlruns").exists()


def finding(tracking_uri: str | None) -> Finding:
    (found,) = check_mlflow(CheckRequest(tracking_uri=tracking_uri))
    return found


def test_a_database_that_answers_or_will_be_made(uri: str, tmp_path: Path) -> None:
    assert finding(None).level == "ok"
    assert (finding(uri).level, finding(uri).text.endswith("answers")) == ("ok", True)
    assert finding(f"sqlite:///{tmp_path}/mlflow.db").level == "ok"
    for typo in ("mlflw.db", "new/mlflow.db"):
        assert finding(f"sqlite:///{tmp_path}/{typo}").level == "error"
        with pytest.raises(UsageError):
            Projection(f"sqlite:///{tmp_path}/{typo}", "c").start(
                CampaignRecord(catalog="c", started=1.0)
            )
    with pytest.raises(UsageError):
        list_registry(f"sqlite:///{tmp_path}/mlflow.db", None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow"]
