"""Sandboxed children and killed workers leave no temporary file, no folder and no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.util import get_temp_dir
from pathlib import Path

import psutil
import pytest

from pipeline.worker.sandbox import _Forkserver
from tests.pipeline import faults
from tests.pipeline.worker.test_sandbox import isolated


def kill_the_forkserver() -> None:
    os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)
    time.sleep(0.2)


def test_killed_forkserver_leaves_no_zombie(tmp_path: Path) -> None:
    found = isolated(tmp_path, kill_the_forkserver)
    assert found.failure is None
    _Forkserver.running()  # the next item starts another one
    assert [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE] == []


WORKER = """
import sys
from pathlib import Path
from pipeline.worker import sandbox
from pipeline.worker.sandbox import run_isolated
from pipeline.worker.supervisor import Bounds
from tests.pipeline import faults

sandbox.PRELOAD = ["pipeline.worker.supervisor"]  # torch, which takes seconds, is not needed here
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    given = {"folder": folder, "log": folder / "log", "bounds": Bounds(timeout_s=60, memory_bytes=4 * 10**9)}
    run_isolated(faults.detach, (str(folder / "pids"), "hang"), **given)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_worker_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "system").mkdir()
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "TMPDIR": str(tmp_path / "system")}
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "worker.py"), str(tmp_path)], env=env, stderr=subprocess.DEVNULL
    ) as worker:
        faults.wait_for_lines(tmp_path / "pids", 2, timeout_s=60)
        below = psutil.Process(worker.pid).children(recursive=True)
        assert len(below) >= 5, "a forkserver, a supervisor, a child and two detached processes"
        worker.send_signal(number)
        worker.wait(30)
    _, alive = psutil.wait_procs(below, timeout=10)
    assert alive == []


def test_temporary_files_are_removed_with_the_child(tmp_path: Path) -> None:
    end = isolated(tmp_path, faults.fill_its_temporary_folder, 3_000_000, str(tmp_path / "places"))
    assert end.failure is not None
    assert end.failure.message.startswith("the process exited with code 3")
    places = [Path(line) for line in (tmp_path / "places").read_text().splitlines()]
    assert all(place.is_relative_to(places[0]) for place in places)
    assert len(str(places[0])) < 60, "the path of a socket has at most 108 characters"
    assert list((tmp_path / "staging").iterdir()) == []


def test_child_may_remove_its_staging_folder(tmp_path: Path) -> None:
    end = isolated(tmp_path, faults.remove_its_folder, str(tmp_path / "staging"))
    assert end.value == 1


UNTIDY = """
import os, sys
from pathlib import Path
from pipeline.worker import sandbox
from pipeline.worker.sandbox import run_isolated
from pipeline.worker.supervisor import Bounds
from tests.pipeline import faults
from tests.pipeline.worker.test_sandbox import add
from tests.pipeline.worker.test_sandbox_leftovers import temporary_file_of_a_process_pool

sandbox.PRELOAD = ["pipeline.worker.supervisor"]
folder = Path(sys.argv[1])
limits = {"folder": folder, "log": folder / "log", "bounds": Bounds(timeout_s=60, memory_bytes=4 * 10**9)}
for number in range(2):
    assert run_isolated(add, (1, number), **limits).failure is None
    end = run_isolated(temporary_file_of_a_process_pool, (), **limits)
    assert end.value.startswith("/proc/"), end
    if number == 0:  # the next item starts another one
        server = sandbox._Forkserver.running().process
        server.kill()
        server.wait()
print("worked", flush=True)
if sys.argv[2] == "leaves":
    os._exit(0)
run_isolated(faults.spin, (), **limits)
"""


def temporary_file_of_a_process_pool() -> str:
    """Return the folder of multiprocessing's sockets in an item that uses it."""
    return get_temp_dir()


@pytest.mark.parametrize("ending", ["leaves", "is killed"])
def test_untidy_worker_leaves_no_temporary_file(tmp_path: Path, ending: str) -> None:
    temporary, folder = tmp_path / "system", tmp_path / "staging"
    temporary.mkdir()
    folder.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", UNTIDY, str(folder), ending]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "worked\n"
        if ending == "is killed":
            deadline = time.monotonic() + 60
            while not list(folder.glob("tmp")):  # a child runs
                assert time.monotonic() < deadline
                time.sleep(0.01)
            worker.kill()
    deadline = time.monotonic() + 60
    while found := [*temporary.iterdir(), *folder.glob("tmp")]:  # the supervisor removes its folder
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
