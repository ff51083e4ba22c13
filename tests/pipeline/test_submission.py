"""Clients of a dashboard that falls silent: they end with a sentence, and a job that merely says nothing is followed on."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from freezer.errors import InfrastructureError
from jobs import submit
from pipeline import submission
from pipeline.submission import Jobs
from tests.pipeline.dashboards import Dashboard, serving
from tests.raylets import LOOPBACK

pytestmark = pytest.mark.filterwarnings("ignore:ssl=None is deprecated:DeprecationWarning")  # Ray's own, of what aiohttp takes

LIMIT_S = 1.0


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONNECT_S", "ANSWER_S", "SILENT_S", "SILENT_MOST_S"):
        monkeypatch.setattr(submission, name, LIMIT_S)
    monkeypatch.setattr(submission, "RETRIES", 1)


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
        self.ended: submission.Job | None = None
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
    monkeypatch.setattr(submission, "ANSWER_S", 30.0)
    dashboard.pause_s = 0.05
    job, submitted = Jobs(dashboard.address).submit("c-", "e", working_dir=tmp_path, environ={})
    assert (job.id, job.status, submitted) == ("c-1", "PENDING", True)
    assert dashboard.num_bytes > 24 << 20
