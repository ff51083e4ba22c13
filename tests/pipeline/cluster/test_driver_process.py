"""A driver that joins a cluster whose Ray dies, and drivers that end by themselves."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.campaign_runs import ONE_MODEL, write_catalog
from tests.support.raylets import ROOT, RayCluster, wait_until

DRIVER = """
import os, sys, time
from functools import partial
from freezer.cli import answer_signals
from jobs.optimize import exits
from pipeline.cluster import in_child
answer_signals("stop")
with exits():
    sys.exit(in_child(exits()(partial(exec, sys.argv[1], globals()))))
"""


def driver(code: str) -> subprocess.Popen[str]:
    """A command whose driver runs some code."""
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", (0, False)),
        ("sys.exit(1)", (1, False)),
        ("1 / 0", (1, False)),
        ("from freezer.errors import UsageError; raise UsageError()", (2, False)),
        ("os._exit(3)", (3, False)),
        ("os._exit(1)", (3, True)),
        ("os.abort()", (3, True)),
    ],
)
def test_only_an_unreported_end_is_rays(code: str, expected: tuple[int, bool]) -> None:
    with driver(code) as process:
        said = process.communicate(timeout=60)[1]
    assert (process.returncode, "CP-RAY: " in said) == expected, said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_driver(number: signal.Signals) -> None:
    with driver("print(os.getpid(), flush=True); time.sleep(60)") as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(number)
        process.wait(30)
        wait_until(lambda: not child.is_running(), "the driver has ended", 10)
    assert process.returncode == (-number if number == signal.SIGKILL else 130)


@pytest.mark.cluster
def test_ray_dies_while_the_driver_connects(tmp_path: Path) -> None:
    """The raylet of this machine takes the connection, and dies before it answers."""
    write_catalog(tmp_path, ONE_MODEL)
    with RayCluster(tmp_path / "cluster") as cluster:
        (raylet,) = cluster.start(num_cpus=1, classes=["portable"]).processes("raylet")
        raylet.suspend()
        paths = [
            "--store",
            str(tmp_path / "store"),
            "--tracking-uri",
            f"sqlite:///{tmp_path}/mlflow.db",
        ]
        command = [sys.executable, "-u", "-m", "jobs.optimize", str(tmp_path / "catalog.yaml")]
        with cluster.popen([*command, *paths]) as process:
            assert process.stdout is not None
            while "connecting to Ray at" not in process.stdout.readline():
                assert process.poll() is None
            time.sleep(3)
            raylet.kill()
            said = process.communicate(timeout=120)[0]
    assert process.returncode == 3, said
    assert "CP-RAY: " in said
