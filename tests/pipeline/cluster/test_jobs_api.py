"""Clients of a silent dashboard, silent jobs, and jobs without a record."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from freezer.errors import InfrastructureError
from freezer.store import Store
from jobs import status, submit
from pipeline.cluster import Jobs, job_prefix, jobs_api
from tests.support.dashboards import Dashboard, serving
from tests.support.raylets import LOOPBACK

pytestmark = pytest.mark.filterwarnings("ignore:ssl=None is deprecated:DeprecationWarning")

LIMIT_S = 1.0


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONNECT_S", "ANSWER_S"):
        monkeypatch.setattr(jobs_api, name, LIMIT_S)
    monkeypatch.setattr(jobs_api, "POLL_S", 0.02)
    monkeypatch.setattr(jobs_api, "RETRIES", 1)


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    with serving() as found:
        yield found


@pytest.fixture
def wordless() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server((LOOPBACK, 0)) as server:
        yield f"http://{LOOPBACK}:{server.getsockname()[1]}"


def test_a_silent_dashboard_is_reported(wordless: str, tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text("models: [{name: m}]\n")
    places = [
        "--store",
        str(tmp_path / "store"),
        "--address",
        wordless,
        "--tracking-uri",
        "http://127.0.0.1:9",
    ]
    done = CliRunner().invoke(submit.app, [*places, str(tmp_path / "catalog.yaml")])
    assert done.exit_code == 3, done.output
    assert f"CP-RAY: Ray's dashboard at {wordless} does not answer (ReadTimeout)" in done.output
    assert "--dashboard-host=0.0.0.0" in done.output, "Ray's default is loopback"


def test_a_head_that_vanishes_is_reported(dashboard: Dashboard) -> None:
    dashboard.job("j", "RUNNING")
    dashboard.log = "first\n"
    jobs = Jobs(dashboard.address)
    shown = []

    def vanish(text: str) -> None:
        shown.append(text)
        dashboard.silent = True

    with pytest.raises(
        InfrastructureError,
        match=r"does not answer .*; job j may still be running: submit it again to follow it",
    ):
        jobs.follow("j", vanish)
    assert shown == ["first\n"]


def test_every_line_of_a_job_is_shown_once(dashboard: Dashboard) -> None:
    dashboard.job("j", "RUNNING")
    dashboard.log = "first\n"
    shown: list[str] = []

    def answer(text: str) -> None:
        shown.append(text)
        if len(shown) == 1:
            dashboard.log += "second\n"
        elif len(shown) == 2:
            dashboard.log += "third\n"
            dashboard.job("j", "FAILED", driver_exit_code=1)

    assert Jobs(dashboard.address).follow("j", answer).verdict == 1
    assert shown == ["first\n", "second\n", "third\n"]


def test_a_slow_upload_is_not_a_timeout(
    dashboard: Dashboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights.bin").write_bytes(os.urandom(1 << 20) * 24)
    monkeypatch.setattr(jobs_api, "ANSWER_S", 30.0)
    dashboard.pause_s = 0.05
    job, submitted = Jobs(dashboard.address).submit("c-", "e", working_dir=tmp_path, environ={})
    assert (job.id, job.status, submitted) == ("c-1", "PENDING", True)
    assert dashboard.num_bytes > 24 << 20


# Failed uploads


def submitted(folder: Path, address: str) -> list[str]:
    """Write a catalog and a file; return the arguments of its submission."""
    (folder / "catalog.yaml").write_text("models: [{name: m}]\n")
    (folder / "weights.bin").write_bytes(b"weights")
    places = ["--store", str(folder / "store"), "--tracking-uri", "http://127.0.0.1:9"]
    return [str(folder / "catalog.yaml"), *places, "--address", address, "--detach"]


# Status


def shown(folder: Path, address: str, *arguments: str) -> Result:
    return CliRunner().invoke(
        status.app, ["c", "--store", str(folder / "store"), "--address", address, *arguments]
    )


@pytest.mark.parametrize(
    ("job", "line"),
    [
        (
            {"status": "PENDING", "message": "Job has not started yet."},
            r"PENDING; Job has not started yet\.",
        ),
        (
            {
                "status": "FAILED",
                "message": "no such catalog",
                "driver_exit_code": 2,
                "start_time": 1000,
                "end_time": 2000,
            },
            (
                r"FAILED, started 1970-01-01T00:00:01\+00:00, ended 1970-01-01T00:00:02\+00:00; no"
                r" such catalog"
            ),
        ),
    ],
)
def test_a_job_without_a_record_has_a_status(
    dashboard: Dashboard, tmp_path: Path, job: dict[str, Any], line: str
) -> None:
    job_id = f"{job_prefix('c', str(tmp_path / 'store'))}1"
    dashboard.job(job_id, **job)
    done = shown(tmp_path, dashboard.address)
    assert done.exit_code == 0, done.output
    assert re.search(
        r"campaign c: store \S+ is not there; .*\njob"
        rf" {job_id}: {line}\n",
        done.output,
    )
    found = json.loads(shown(tmp_path, dashboard.address, "--json").output)
    assert (found["campaign"], found["status"], found["job"]["status"]) == (
        "c",
        None,
        job["status"],
    )
    assert found["job"]["message"] == job["message"]


def test_a_campaign_with_neither_job_nor_record_is_unknown(
    dashboard: Dashboard, tmp_path: Path
) -> None:
    dashboard.job(f"{job_prefix('c', str(tmp_path / 'other'))}1", "PENDING")
    assert shown(tmp_path, dashboard.address).exit_code == 3
    Store.open(str(tmp_path / "store"), create=True)
    done = shown(tmp_path, dashboard.address)
    assert (done.exit_code, "has no campaign 'c'; it has: none" in done.output) == (
        2,
        True,
    ), done.output
