"""The sandbox: every way to fail is one typed failure, and no process of the child survives."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from freezer.freezing import in_hand
from freezer.timing import alone
from pipeline.records import Failure
from pipeline.worker import sandbox
from pipeline.worker.child import End
from pipeline.worker.sandbox import _Forkserver, run_isolated
from pipeline.worker.supervisor import LOG_LIMIT_BYTES, Bounds
from pipeline.workspace import is_measured, machine_time
from tests.support import faults
from tests.support.raylets import ROOT, wait_until
from tests.support.steps import python

FIRST_START_S = 60
"""The first child of a process waits until its forkserver has imported torch."""


def isolated(
    tmp_path: Path,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60,
    memory_gb: float = 4,
    asked: bool = True,
    preload: str = "",
) -> End:
    bounds = Bounds(timeout_s=timeout_s, memory_bytes=int(memory_gb * 1e9), asked=asked)
    (tmp_path / "staging").mkdir(exist_ok=True)
    return run_isolated(
        function,
        args,
        folder=tmp_path / "staging",
        bounds=bounds,
        preload=preload,
    )


def failed(tmp_path: Path, function: Callable[..., Any], *args: Any, **limits: Any) -> Failure:
    """The failure of a child that fails."""
    failure = isolated(tmp_path, function, *args, **limits).failure
    assert failure is not None
    return failure


def add(a: int, b: int) -> tuple[int, int]:
    print("adding")
    return a + b, os.getpid()


def is_imported(name: str) -> bool:
    return name in sys.modules


def hang_with_children(pid_file: str) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    Path(pid_file).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(1000)


def kill_its_parent_beside_a_child(pid_file: str) -> None:
    Path(pid_file).write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
    os.kill(os.getppid(), signal.SIGKILL)


def gone(pid: int) -> bool:
    """Whether a process is gone, not even a zombie."""
    return not psutil.pid_exists(pid)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """After each test: no process but the forkserver, and no handle."""
    process = psutil.Process()
    server = _Forkserver.running().process.pid
    before = {child.pid for child in process.children(recursive=True)}
    handles = process.num_fds()
    yield
    known = {*before, _Forkserver.running().process.pid}
    assert [child for child in process.children(recursive=True) if child.pid not in known] == []
    if _Forkserver.running().process.pid == server:
        assert process.num_fds() <= handles


def test_result_of_another_process(tmp_path: Path) -> None:
    end = isolated(tmp_path, add, 1, 2)
    assert (end.value[0], end.failure) == (3, None)
    assert end.value[1] != os.getpid()
    assert (tmp_path / "staging" / "child.log").read_text() == "adding\n"
    assert 0 < end.wall_s < FIRST_START_S


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (faults.raise_without_words, "error", "_SpeechlessError: no message"),
        (
            faults.save_beyond_a_full_disk,
            "disk",
            "could not write a file, and the process died of SIGABRT",
        ),
        (faults.recurse, "crash", "died of SIGSEGV"),
        (faults.kill_itself, "crash", "died of SIGKILL"),
        (faults.become_another_program, "crash", "exited with code 0 without a result"),
        (faults.open_everything, "error", "Too many open files"),
        (faults.ask_for_input, "error", "EOFError"),
    ],
)
def test_failures_are_typed(
    tmp_path: Path, function: Callable[[], None], kind: str, message: str
) -> None:
    failure = failed(tmp_path, function)
    assert failure.kind == kind, failure
    assert re.search(message, failure.message), failure.message
    assert failure.code is not None


def test_failed_supervisor_is_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "staging" / "child.log").mkdir(parents=True)
    failure = failed(tmp_path, add, 1, 2)
    assert (failure.kind, failure.code) == ("infrastructure", "CP-INFRASTRUCTURE")
    assert "[Errno 21] Is a directory: " in failure.message


def test_crash_reports_its_source_line(tmp_path: Path) -> None:
    failure = failed(tmp_path, faults.segfault)
    assert (failure.kind, "died of SIGSEGV" in failure.message) == ("crash", True)
    assert "Fatal Python error: Segmentation fault" in failure.log_tail
    assert (
        f'faults.py", line {faults.segfault.__code__.co_firstlineno + 2} in segfault'
        in failure.log_tail
    )


def test_timeout_ends_all_children_and_reports_the_line(tmp_path: Path) -> None:
    end = isolated(tmp_path, hang_with_children, str(tmp_path / "pids"), timeout_s=2)
    assert end.failure is not None
    assert end.failure.kind == "timeout"
    assert "raise limits.timeout_s" in end.failure.message
    assert 2 <= end.wall_s < 20
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())
    assert "in hang_with_children" in end.failure.log_tail


@pytest.mark.parametrize("function", [faults.spin, faults.stop_itself])
def test_timeout_ends_a_child_that_ignores_signals(
    tmp_path: Path, function: Callable[[], None]
) -> None:
    end = isolated(tmp_path, function, timeout_s=0.5)
    assert (end.failure and end.failure.kind, end.wall_s < 5) == ("timeout", True)


def test_killed_supervisor_leaves_no_process(tmp_path: Path) -> None:
    """One that is stopped with a share of the machine's time would block all judges."""
    assert failed(tmp_path, kill_its_parent_beside_a_child, str(tmp_path / "pid")).kind == "crash"
    wait_until(lambda: gone(int((tmp_path / "pid").read_text())), "it is killed")


SLOW_START = """
import sys
from pathlib import Path
from pipeline.worker import sandbox
from pipeline.worker.supervisor import Bounds
from tests.support.faults import limits

sandbox.PRELOAD = ["slow_to_import"]
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    bounds = Bounds(timeout_s=3, memory_bytes=4 * 10**9)
    given = {"folder": folder, "bounds": bounds}
    try:
        end = sandbox.run_isolated(limits, (), **given)
        print(end.failure is None and end.wall_s < 3)
    except sandbox.InfrastructureError as error:
        print(error.code)
"""
"""Runs an item with a limit of 3 s in a process whose forkserver first runs some Python."""


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ("import time, freezer.timing; time.sleep(4)", "True"),
        ("import os; os._exit(1)", "CP-INFRASTRUCTURE"),
    ],
)
def test_forkserver_start(tmp_path: Path, imports: str, expected: str) -> None:
    """It counts against no limit of the item; one that dies is an infrastructure error."""
    (tmp_path / "slow_to_import.py").write_text(imports)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    assert python(SLOW_START, tmp_path, env=env).splitlines()[-1] == expected


@pytest.mark.parametrize("name", ["poplib", "lacking"])
def test_a_further_module_is_imported_before_the_fork(tmp_path: Path, name: str) -> None:
    """Unless it fails."""
    assert isolated(tmp_path, is_imported, name, preload=name).value == (name == "poplib")


@pytest.mark.parametrize("function", [faults.eat, faults.eat_in_children])
def test_memory_limit_stops_the_child(tmp_path: Path, function: Callable[[], None]) -> None:
    end = isolated(tmp_path, function, memory_gb=1.2)
    assert end.failure is not None
    assert (end.failure.kind, end.failure.code, end.failure.tried_bytes) == (
        "memory",
        "CP-MEMORY",
        1.2e9,
    )
    assert 1.2e9 < end.peak_bytes < 4e9
    assert "used more than 1.2 GB; raise limits.memory_gb" in end.failure.message


def test_large_request_is_refused_before_it_is_resident(tmp_path: Path) -> None:
    end = isolated(tmp_path, faults.eat_at_once, 12 * 10**9, memory_gb=1.2, asked=False)
    assert end.failure is not None
    assert (end.failure.kind, end.failure.code) == ("memory", "CP-MEMORY-NODE")
    assert end.peak_bytes < 1.2e9, "nothing of it was ever resident"
    assert re.search(
        r"requested more memory than its limit of 1.2 GB plus spare \(MemoryError: .*\)",
        end.failure.message,
    )
    assert "kept = bytearray(num_bytes)" in end.failure.log_tail, "the line that asked for it"


def test_child_limits(tmp_path: Path) -> None:
    """The kernel's OOM killer takes the child first; it writes no core file."""
    core, _, score = isolated(tmp_path, faults.limits, memory_gb=3).value
    assert (core, score) == (0, 1000)


def test_oom_kill_is_a_failure_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter((3, 4))
    monkeypatch.setattr(sandbox, "_oom_kills", lambda: next(kills))
    failure = failed(tmp_path, faults.kill_itself)
    assert (failure.kind, failure.code) == ("memory", "CP-MEMORY-NODE")
    assert re.search("ran out of memory when it used .* GB", failure.message), failure.message


def test_fork_bomb_is_stopped(tmp_path: Path) -> None:
    failure = failed(tmp_path, faults.fork_for_ever)
    assert (failure.kind, failure.code) == ("processes", "CP-PROCESSES")
    assert "had more than 100 processes at a time" in failure.message


def test_endless_output_is_stopped(tmp_path: Path) -> None:
    failure = failed(tmp_path, faults.talk)
    assert failure.kind == "output"
    assert (tmp_path / "staging" / "child.log").stat().st_size == LOG_LIMIT_BYTES
    assert len(failure.log_tail) <= 20_000


def kill_the_forkserver() -> None:
    os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)
    time.sleep(0.2)


def test_killed_forkserver_is_replaced(tmp_path: Path) -> None:
    assert isolated(tmp_path, kill_the_forkserver).failure is None
    assert isolated(tmp_path, add, 1, 2).value[0] == 3, "by another forkserver"
    assert [
        child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE
    ] == []


WORKER = """
import sys
from pathlib import Path
from pipeline.worker import sandbox
from pipeline.worker.sandbox import _Forkserver, run_isolated
from pipeline.worker.supervisor import Bounds
from tests.support import faults

sandbox.PRELOAD = ["pipeline.worker.supervisor"]  # torch, which takes seconds, is not needed here
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    bounds = Bounds(timeout_s=60, memory_bytes=4 * 10**9)
    given = {"folder": folder, "bounds": bounds}
    run_isolated(faults.detach, (str(folder / "pids"), "hang"), **given)
"""


def worker_in(folder: Path, **env: str) -> subprocess.Popen[bytes]:
    """A worker with a child that has started two detached processes."""
    (folder / "worker.py").write_text(WORKER)
    return subprocess.Popen(
        [sys.executable, str(folder / "worker.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stderr=subprocess.DEVNULL,
    )


def test_killed_worker_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "system").mkdir()
    with worker_in(tmp_path, TMPDIR=str(tmp_path / "system")) as worker:
        faults.wait_for_lines(tmp_path / "pids", 2, timeout_s=60)
        below = psutil.Process(worker.pid).children(recursive=True)
        assert len(below) >= 5, "a forkserver, a supervisor, a child and two detached processes"
        worker.kill()
        worker.wait(30)
    _, alive = psutil.wait_procs(below, timeout=10)
    assert alive == []
    assert list((tmp_path / "system").iterdir()) == []


def test_temporary_files_are_removed_with_the_child(tmp_path: Path) -> None:
    end = isolated(tmp_path, faults.fill_its_temporary_folder, 3_000_000, str(tmp_path / "places"))
    assert end.failure is not None
    assert end.failure.message.startswith("the process exited with code 3")
    places = [Path(line) for line in (tmp_path / "places").read_text().splitlines()]
    assert all(place.is_relative_to(places[0]) for place in places)
    assert len(str(places[0])) < 60, "the path of a socket has at most 108 characters"


@pytest.mark.parametrize("then", ["return", "crash"])
def test_detached_processes_are_ended(tmp_path: Path, then: str) -> None:
    end = isolated(tmp_path, faults.detach, str(tmp_path / "pids"), then)
    assert (end.failure is None) == (then == "return")
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def largest_gap_s(run_s: float) -> tuple[float, int]:
    """The longest time in which this process did not run, of an interval, and how often it was
    paused.
    """
    start = last = time.monotonic()
    largest = 0.0
    while last - start < run_s:
        now = time.monotonic()
        largest, last = max(largest, now - last), now
        time.sleep(0.001)
    return largest, in_hand.memory[in_hand.PAUSES]


def test_children_pause_while_a_judge_measures(tmp_path: Path) -> None:
    """Neither their time limit nor their duration counts the pause."""
    with subprocess.Popen([sys.executable, "-c", MEASURE, "3"]):
        end = isolated(tmp_path, largest_gap_s, 5.0, timeout_s=4)
    assert end.failure is None
    gap_s, num_pauses = end.value
    assert 2.5 < gap_s < 3.5
    assert num_pauses == 1
    assert end.wall_s < 3.5


MEASURE = """
import sys, time
from pipeline.workspace.machine_time import alone
time.sleep(1)
with alone():
    time.sleep(float(sys.argv[1]))
"""
"""A judge that measures after a second."""


def test_killed_judge_leaves_the_machine(tmp_path: Path) -> None:
    judge = subprocess.Popen([sys.executable, "-c", MEASURE, "600"])
    wait_until(is_measured, "the judge measures")
    judge.kill()
    judge.wait()
    assert isolated(tmp_path, add, 1, 2).value[0] == 3


def measure_s() -> float:
    """How long a child waits for the machine."""
    start = time.monotonic()
    with alone():
        return time.monotonic() - start


def test_judge_does_not_wait_for_itself(tmp_path: Path) -> None:
    assert isolated(tmp_path, measure_s, timeout_s=5).value < 1


def measure_often(run_s: float) -> None:
    """Have the machine alone, again and again, with forks that outlive their turn."""
    start = time.monotonic()
    while time.monotonic() - start < run_s:
        with alone():
            pass
    with alone():
        if os.fork() == 0:
            time.sleep(60)


def test_judge_is_not_stopped_with_the_turn(tmp_path: Path) -> None:
    assert isolated(tmp_path, measure_often, 3.0).failure is None


def test_worker_is_obeyed_before_the_child_starts(tmp_path: Path) -> None:
    """A supervisor that waits for the machine ends with its worker."""
    with machine_time.alone(), worker_in(tmp_path) as worker:
        process = psutil.Process(worker.pid)
        wait_until(lambda: len(process.children(recursive=True)) == 2, "its supervisor waits")
        below = process.children(recursive=True)
        worker.kill()
        assert psutil.wait_procs(below, timeout=10)[1] == []


def test_worker_and_supervisor_killed_during_a_pause(tmp_path: Path) -> None:
    """Nothing that they leave stays stopped."""
    with worker_in(tmp_path) as worker:
        faults.wait_for_lines(tmp_path / "pids", 2, timeout_s=60)
        [forkserver] = psutil.Process(worker.pid).children()
        [supervisor] = forkserver.children()
        whole = supervisor.children(recursive=True)
        below = [each for each in whole if each.status() != psutil.STATUS_ZOMBIE]
        with machine_time.alone():
            still = ("stopped", psutil.STATUS_ZOMBIE)
            wait_until(lambda: all(each.status() in still for each in below), "they pause")
            supervisor.kill()
            worker.kill()
            _, alive = psutil.wait_procs([forkserver, supervisor, *below], timeout=10)
    assert alive == []
