"""Following a job: every answer to Ctrl-C at a terminal."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cluster import job_prefix
from tests.support.campaign_runs import HANGS, write_catalog
from tests.support.heads import Head, Terminal, started_head

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CTRL_C, END_OF_INPUT = "\x03", "\x04"
ASKED = "leave it running] "


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    with started_head(tmp_path_factory.mktemp("home"), {"RAY_AUTH_MODE": "disabled"}) as found:
        yield found


def job_of(head: Head, folder: Path) -> str:
    """Return the status of the job of campaign `c` from jobs.status."""
    places = ["c", "--store", str(folder / "store"), "--address", head.address, "--json"]
    command = [sys.executable, "-W", "ignore", "-m", "jobs.status", *places]
    done = subprocess.run(
        command, env=head.environ, capture_output=True, text=True, timeout=120, check=True
    )
    status: str = json.loads(done.stdout)["job"]["status"]
    return status


def test_ctrl_c_asks_whether_to_stop_the_job(head: Head, tmp_path: Path) -> None:
    write_catalog(tmp_path, HANGS)
    command = head.command(tmp_path, "catalog.yaml", "--campaign", "c")
    job = f"{job_prefix('c', str(tmp_path / 'store'))}1"
    left = (
        f"job {job} keeps running; coldpress status c --store {tmp_path / 'store'} --address"
        f" {head.address}"
    )

    with Terminal(command, cwd=tmp_path, environ=head.environ) as terminal:
        terminal.until(f"submitted {job}")
        terminal.until("build hangs portable")
        terminal.type(CTRL_C)
        assert f"stop job {job} too? [y: stop it" in terminal.until(ASKED)
        terminal.type("n\n")  # keep following
        time.sleep(3)
        assert terminal.running, terminal.said
        terminal.type(CTRL_C)
        terminal.until(ASKED)
        terminal.type(CTRL_C)
        terminal.until(left)
        assert terminal.ended() == 130
        assert terminal.said.count("build hangs portable") == 1, "what was shown is not shown again"
    assert job_of(head, tmp_path) == "RUNNING"

    with Terminal(command, cwd=tmp_path, environ=head.environ) as terminal:
        terminal.until(f"is running already as {job}; attached to it")
        terminal.until("build hangs portable")
        terminal.type(CTRL_C)
        terminal.until(ASKED)
        terminal.type(END_OF_INPUT)
        terminal.until(left)
        assert terminal.ended() == 130
    assert job_of(head, tmp_path) == "RUNNING"

    with Terminal(command, cwd=tmp_path, environ=head.environ) as terminal:
        terminal.until("build hangs portable")
        terminal.type(CTRL_C)
        terminal.until(ASKED)
        terminal.type("y\n")
        terminal.until(f"stopping job {job}; finished work is kept")
        terminal.until(f"job {job}: stopped")
        assert terminal.ended() == 130
        assert "Traceback" not in terminal.said
    assert job_of(head, tmp_path) == "STOPPED"
