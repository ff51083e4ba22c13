"""What a scenario finds of processes that were left behind, and what it leaves alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.pipeline import faults
from tests.raylets import RayCluster, Raylet

WORKER = """
import sys
from pathlib import Path
from pipeline.worker import sandbox
from pipeline.worker.sandbox import Memory, run_isolated
from tests.pipeline import faults

sandbox.PRELOAD = ["pipeline.worker.supervisor"]  # torch, which takes seconds, is not needed here
if __name__ == "__main__":
    folder = Path.cwd()
    given = {"folder": folder, "log": folder / "log", "timeout_s": 300, "memory": Memory(limit_bytes=4 * 10**9)}
    for words in sys.stdin:
        function, *args = words.split()
        print(run_isolated(getattr(faults, function), tuple(args), **given).kind, flush=True)
"""
"""As one of Ray's: it works on an item for each line that it is told, and keeps its forkserver warm between them."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
    """A cluster whose one raylet is such a worker."""
    with RayCluster(tmp_path / "home") as found:
        (tmp_path / "worker.py").write_text(WORKER)
        worker = subprocess.Popen(
            [sys.executable, str(tmp_path / "worker.py")],
            env=found.environment,
            cwd=found.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        found.raylets.append(Raylet(worker, tmp_path / "log", is_head=True))
        with worker:
            yield found
            worker.kill()


def told(cluster: RayCluster, words: str) -> subprocess.Popen[bytes]:
    """The worker, given an item."""
    worker = cluster.raylets[0].process
    assert worker.stdin is not None
    worker.stdin.write(f"{words}\n".encode())
    worker.stdin.flush()
    return worker


def test_a_warm_worker_is_left_alone_and_its_item_is_not(cluster: RayCluster) -> None:
    worker = told(cluster, "detach pids return")
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"ok\n"
    assert any("multiprocessing.forkserver" in " ".join(process.cmdline()) for process in cluster.raylets[0].processes())
    assert cluster.left() == {}
    (cluster.folder / "pids").unlink()
    told(cluster, "detach pids hang")
    faults.wait_for_lines(cluster.folder / "pids", 2, timeout_s=60)
    detached = {int(line) for line in (cluster.folder / "pids").read_text().split()}
    left = cluster.left(0).keys()
    assert detached < left
    assert len(left) >= 4, "a keeper and a child besides"
    assert not {worker.pid, os.getpid()} & left


def test_what_outlives_a_worker_that_was_killed_is_found(cluster: RayCluster) -> None:
    worker = told(cluster, "detach pids hang")
    faults.wait_for_lines(cluster.folder / "pids", 2, timeout_s=60)
    keeper = next(pid for pid in cluster.left(0) if os.getsid(psutil.Process(pid).ppid()) == worker.pid)
    os.kill(keeper, signal.SIGSTOP)
    worker.kill()
    worker.wait(30)
    assert keeper in cluster.left(1)
    os.kill(keeper, signal.SIGCONT)
    assert cluster.left() == {}, "it ends everything when it may"


def test_what_outlives_the_cluster_is_ended_and_told(tmp_path: Path) -> None:
    with RayCluster(tmp_path / "home") as cluster:
        with subprocess.Popen(["sleep", "1000"], env=cluster.environment, start_new_session=True) as stray:
            (told_of,) = cluster.end(0.5)
            assert told_of.endswith("sleep 1000")
        assert not psutil.pid_exists(stray.pid)
    assert cluster.end() == []
