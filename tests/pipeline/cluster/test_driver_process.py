"""A driver that Ray's C++ code ends, and one that ends by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.campaign_runs import ONE_MODEL, write_catalog
from tests.support.heads import started_head
from tests.support.raylets import ROOT, wait_until

DRIVER = """
import os, sys, time
from freezer.cli import exiting
from pipeline.cluster import continue_in_child
with exiting(interrupted="interrupted"):
    continue_in_child()
    print(os.getpid(), flush=True)
    exec(sys.argv[1])
"""


def driver(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [("pass", 0), ("sys.exit(1)", 1), ("1 / 0", 1), ("os._exit(3)", 3), ("os._exit(1)", 3)],
)
def test_the_exit_code_is_that_of_the_child(code: str, expected: int) -> None:
    with driver(code) as process:
        said = process.communicate(timeout=60)[1]
    assert process.returncode == expected
    assert said.startswith("CP-RAY: ") == (code == "os._exit(1)")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_child(number: signal.Signals) -> None:
    code = "import signal; signal.signal(15, lambda *_: sys.exit(15)); time.sleep(60)"
    with driver(code) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        time.sleep(0.5)
        process.send_signal(number)
        process.wait(30)
        wait_until(lambda: not child.is_running(), "the child has ended", 10)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 15}.get(number, -number)


@pytest.mark.cluster
def test_ray_dies_while_the_driver_registers(tmp_path: Path) -> None:
    """The raylet of this machine takes the connection, and dies before it answers."""
    write_catalog(tmp_path, ONE_MODEL)
    with started_head(tmp_path, {}) as head:
        (raylet,) = (
            process
            for process in psutil.Process().children(recursive=True)
            if process.name() == "raylet"
        )
        raylet.suspend()
        paths = ["--store", str(tmp_path / "store"), "--tracking-uri", f"sqlite:///{tmp_path}/m.db"]
        command = [sys.executable, "-m", "jobs.optimize", "catalog.yaml", *paths]
        with subprocess.Popen(
            [*command, "--address", head.gcs_address],
            cwd=tmp_path,
            env={**head.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            while "connecting to Ray at" not in process.stdout.readline():
                assert process.poll() is None
            time.sleep(3)
            raylet.kill()
            said = process.communicate(timeout=120)[1]
    assert process.returncode == 3
    assert "CP-RAY: " in said
