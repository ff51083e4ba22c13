"""Clients of a dashboard that falls silent, jobs that say nothing, and jobs that have recorded nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from freezer.errors import InfrastructureError
from freezer.store.store import Store
from jobs import status, submit
from pipeline.cluster import jobs_api
from pipeline.cluster.jobs_api import Jobs, job_prefix
from tests.pipeline.dashboards import Dashboard, serving
from tests.pipeline.full_disks import full_disk
from tests.raylets import LOOPBACK, ROOT

pytestmark = pytest.mark.filterwarnings("ignore:ssl=None is deprecated:DeprecationWarning")  # Ray's own, of what aiohttp takes

LIMIT_S = 1.0


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONNECT_S", "ANSWER_S", "SILENT_S", "SILENT_MOST_S"):
        monkeypatch.setattr(jobs_api, name, LIMIT_S)
    monkeypatch.setattr(jobs_api, "RETRIES", 1)


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    with serving() as found:
        yield found


@pytest.fixture
def wordless() -> Iterator[str]:
    """The address of a server that takes every connection and answers none."""
    with socket.create_server((LOOPBACK, 0)) as server:
        yield f"http://{LOOPBACK}:{server.getsockname()[1]}"


class Following:
    """A job that is followed by a thread, and what of its log was shown."""

    def __init__(self, jobs: Jobs, job_id: str) -> None:
        self.shown: list[str] = []
        self.ended: jobs_api.Job | None = None
        self._thread = threading.Thread(target=self._follow, args=(jobs, job_id), daemon=True)
        self._thread.start()

    def _follow(self, jobs: Jobs, job_id: str) -> None:
        self.ended = jobs.follow(job_id, self.shown.append)

    def until(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + 20
        while not holds():
            assert time.monotonic() < deadline, self.shown
            time.sleep(0.02)


def test_a_dashboard_that_takes_connections_and_does_not_answer_is_told(wordless: str, tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text("models: []\n")
    places = ["--store", str(tmp_path / "store"), "--address", wordless, "--tracking-uri", "http://127.0.0.1:9"]
    done = CliRunner().invoke(submit.app, [*places, str(tmp_path / "catalog.yaml")])
    assert done.exit_code == 3, done.output
    assert f"CP-RAY: Ray's dashboard at {wordless} does not answer (ReadTimeout)" in done.output


def test_a_head_that_vanishes_while_its_job_is_followed_is_told(dashboard: Dashboard) -> None:
    dashboard.job("j", "RUNNING")
    dashboard.log = "first\n"
    jobs, shown = Jobs(dashboard.address), []

    def vanish(text: str) -> None:
        shown.append(text)
        dashboard.silent = True

    with pytest.raises(InfrastructureError, match=r"does not answer .*; job j may be going on: submit it again to follow it"):
        jobs.follow("j", vanish)
    assert shown == ["first\n"]


def test_a_job_that_says_nothing_for_long_is_followed_on_and_every_line_is_shown_once(dashboard: Dashboard) -> None:
    dashboard.job("j", "RUNNING")
    dashboard.log = "first\n"
    following = Following(Jobs(dashboard.address), "j")
    following.until(lambda: dashboard.num_tails >= 3)
    dashboard.log += "second\n"
    following.until(lambda: len(following.shown) == 2)
    dashboard.log += "third\n"
    dashboard.job("j", "SUCCEEDED")
    following.until(lambda: following.ended is not None)
    assert "".join(following.shown) == "first\nsecond\nthird\n"


def test_what_a_job_said_over_a_connection_that_was_lost_is_shown_when_it_has_ended(dashboard: Dashboard) -> None:
    dashboard.job("j", "RUNNING")
    dashboard.log, dashboard.mute = "first\n", 1
    following = Following(Jobs(dashboard.address), "j")
    following.until(lambda: following.shown)
    dashboard.log += "last\n"
    dashboard.job("j", "FAILED", driver_exit_code=1)
    following.until(lambda: following.ended is not None)
    assert "".join(following.shown) == "first\nlast\n"
    assert following.ended is not None
    assert following.ended.verdict == 1


def test_sending_a_package_may_take_long_while_the_dashboard_takes_it_in(
    dashboard: Dashboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights.bin").write_bytes(os.urandom(1 << 20) * 24)  # more than the buffers of a connection hold
    monkeypatch.setattr(jobs_api, "ANSWER_S", 30.0)
    dashboard.pause_s = 0.05
    job, submitted = Jobs(dashboard.address).submit("c-", "e", working_dir=tmp_path, environ={})
    assert (job.id, job.status, submitted) == ("c-1", "PENDING", True)
    assert dashboard.num_bytes > 24 << 20


# What does not travel


def submitted(folder: Path, address: str) -> list[str]:
    """Of a catalog in `folder`, with a file beside it."""
    (folder / "catalog.yaml").write_text("models: []\n")
    (folder / "weights.bin").write_bytes(b"weights")
    places = ["--store", str(folder / "store"), "--tracking-uri", "http://127.0.0.1:9"]
    return [str(folder / "catalog.yaml"), *places, "--address", address, "--detach"]


@pytest.mark.parametrize(("is_there", "why"), [(True, "No space left on device"), (False, "No such file or directory")])
def test_a_temporary_folder_that_takes_nothing_is_told(
    dashboard: Dashboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool, why: str
) -> None:
    folder = tmp_path / "scratch"
    with full_disk(folder) if is_there else contextlib.nullcontext(), monkeypatch.context() as patched:
        patched.setattr(tempfile, "tempdir", str(folder))
        done = CliRunner().invoke(submit.app, submitted(tmp_path, dashboard.address))
    assert done.exit_code == 3, done.output
    assert re.search(rf"CP-TEMPORARY: .* cannot be packed in the temporary folder {folder} \(.*{why}.*\); make room", done.output)
    assert CliRunner().invoke(submit.app, submitted(tmp_path, dashboard.address)).exit_code == 0


def test_a_file_that_cannot_be_read_is_named(dashboard: Dashboard, tmp_path: Path) -> None:
    words = submitted(tmp_path, dashboard.address)
    (tmp_path / "weights.bin").chmod(0)
    command = [sys.executable, "-W", "ignore", "-m", "jobs.submit", *words]
    if os.geteuid() == 0:  # who may read every file, unless that is taken away
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert re.search(r"CP-USAGE: \S+weights.bin is to travel to the cluster, and cannot be read \(Permission denied\)", done.stderr)
    assert "Traceback" not in done.stderr


# Status


def shown(folder: Path, address: str, *arguments: str) -> Result:
    return CliRunner().invoke(status.app, ["c", "--store", str(folder / "store"), "--address", address, *arguments])


def test_the_status_of_a_job_needs_a_dashboard_that_answers(wordless: str, tmp_path: Path) -> None:
    done = shown(tmp_path, wordless)
    assert done.exit_code == 3, done.output
    assert f"CP-RAY: Ray's dashboard at {wordless} does not answer (ReadTimeout)" in done.output


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize(
    ("job", "line"),
    [
        ({"status": "PENDING", "message": "Job has not started yet."}, r"PENDING; Job has not started yet\."),
        (
            {"status": "FAILED", "message": "no such catalog", "driver_exit_code": 2, "start_time": 1000, "end_time": 2000},
            r"FAILED, started 1970-01-01T00:00:01\+00:00, ended 1970-01-01T00:00:02\+00:00; no such catalog",
        ),
    ],
)
def test_a_job_that_has_recorded_nothing_is_told(
    dashboard: Dashboard, tmp_path: Path, job: dict[str, Any], line: str, made: bool
) -> None:
    if made:
        Store.open(str(tmp_path / "store"), create=True)
    job_id = f"{job_prefix('c', str(tmp_path / 'store'))}1"
    dashboard.job(job_id, **job)
    done = shown(tmp_path, dashboard.address)
    assert done.exit_code == 0, done.output
    assert re.search(rf"campaign c: the store \S+ has no record of it yet\njob {job_id}: {line}\n", done.output)
    found = json.loads(shown(tmp_path, dashboard.address, "--json").output)
    assert (found["campaign"], found["status"], found["job"]["status"]) == ("c", None, job["status"])
    assert found["job"]["message"] == job["message"]


def test_a_campaign_with_neither_job_nor_record_is_unknown(dashboard: Dashboard, tmp_path: Path) -> None:
    dashboard.job(f"{job_prefix('c', str(tmp_path / 'other'))}1", "PENDING")
    assert shown(tmp_path, dashboard.address).exit_code == 3
    Store.open(str(tmp_path / "store"), create=True)
    done = shown(tmp_path, dashboard.address)
    assert (done.exit_code, "has no campaign 'c'; it has: none" in done.output) == (2, True), done.output
