"""The check of scenarios for stray processes: it ignores idle workers, and finds items and what outlives a worker."""

from __future__ import annotations

import os
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

sandbox.PRELOAD = ["pipeline.worker.supervisor"]  # torch takes seconds, and is not needed here
if __name__ == "__main__":
    folder = Path.cwd()
    for words in sys.stdin:
        function, *args = words.split()
        memory = Memory(limit_bytes=4 * 10**9)
        end = run_isolated(getattr(faults, function), tuple(args), folder=folder, log=folder / "log", timeout_s=300, memory=memory)
        print(end.value, end.failure, flush=True)
"""
"""A stand-in for a worker of Ray: it runs one item for each line of its input, and keeps its forkserver between them."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
    """A cluster whose only raylet is such a worker."""
    with RayCluster(tmp_path / "home") as found:
        (tmp_path / "worker.py").write_text(WORKER)
        with subprocess.Popen(
            [sys.executable, str(tmp_path / "worker.py")],
            env=found.environment,
            cwd=found.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as worker:
            found.raylets.append(Raylet(worker))
            yield found
            worker.kill()


def give(worker: subprocess.Popen[bytes], item: str) -> None:
    assert worker.stdin is not None
    worker.stdin.write(f"{item}\n".encode())
    worker.stdin.flush()


def test_strays_are_items_and_what_outlives_a_worker(cluster: RayCluster) -> None:
    worker = cluster.raylets[0].process
    give(worker, "detach pids return")
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"None None\n"
    assert any("multiprocessing.forkserver" in " ".join(process.cmdline()) for process in cluster.raylets[0].processes())
    assert cluster.left() == {}
    (cluster.folder / "pids").unlink()
    give(worker, "detach pids hang")
    detached = {int(line) for line in faults.wait_for_lines(cluster.folder / "pids", 2, timeout_s=60)}
    left = cluster.left(0).keys()
    assert detached < left
    assert not {worker.pid, os.getpid()} & left
    keeper = psutil.Process(next(pid for pid in left if os.getsid(psutil.Process(pid).ppid()) == worker.pid))
    keeper.suspend()
    worker.kill()
    worker.wait(30)
    assert keeper.pid in cluster.left(1)
    keeper.resume()
    assert cluster.left() == {}, "the keeper ends the item"


def test_processes_that_outlive_the_cluster_are_killed(tmp_path: Path) -> None:
    with RayCluster(tmp_path / "home") as cluster:
        with subprocess.Popen(["sleep", "1000"], env=cluster.environment, start_new_session=True) as stray:
            (command,) = cluster.end(0.5)
            assert command.endswith("sleep 1000")
        assert not psutil.pid_exists(stray.pid)
