"""Following a job at a terminal, until Ctrl-C."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cluster import job_prefix
from tests.support.campaign_runs import HANGS, write_catalog
from tests.support.heads import Head, Terminal, started_head

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    with started_head(tmp_path_factory.mktemp("home"), {"RAY_AUTH_MODE": "disabled"}) as found:
        yield found


def job_of(head: Head, job: str) -> str:
    """Return what Ray prints on the status of a job."""
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "job", "status", job, "--address", head.address]
    done = subprocess.run(
        command, env=head.environ, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout + done.stderr


def test_ctrl_c_leaves_the_job_running(head: Head, tmp_path: Path) -> None:
    write_catalog(tmp_path, HANGS)
    command = head.command(tmp_path, "catalog.yaml", "--campaign", "c")
    job = f"{job_prefix('c', str(tmp_path / 'store'))}1"
    for said in (f"submitted {job}", f"is running already as {job}; attached to it"):
        with Terminal(command, cwd=tmp_path, environ=head.environ) as terminal:
            terminal.until(said)
            terminal.until("build hangs portable")
            terminal.type("\x03")
            terminal.until(f"job {job} keeps running; coldpress status c --store ")
            assert terminal.ended() == 130
            assert terminal.said.count("build hangs portable") == 1
        assert "RUNNING" in job_of(head, job)
