"""Clients of a silent dashboard, silent jobs, and jobs without a record."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import Result

from freezer.errors import InfrastructureError
from jobs import submit
from pipeline.cluster import Jobs, jobs_api
from tests.support.commands import invoked
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


def submitted(folder: Path, address: str) -> Result:
    """Submit a catalog to a dashboard."""
    (folder / "catalog.yaml").write_text("models: [{name: m}]\n")
    places = ["--store", str(folder / "store"), "--tracking-uri", "http://127.0.0.1:9"]
    return invoked(submit.app, folder / "catalog.yaml", *places, "--address", address)


def test_ctrl_c_leaves_the_job_running(
    dashboard: Dashboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Jobs, "follow", interrupted)
    done = submitted(tmp_path, dashboard.address)
    (job,) = dashboard.jobs
    assert (done.exit_code, dashboard.jobs[job]["status"]) == (130, "PENDING"), done.output
    assert f"ray job stop {job}" in done.output


def test_a_silent_dashboard_is_reported(wordless: str, tmp_path: Path) -> None:
    done = submitted(tmp_path, wordless)
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
