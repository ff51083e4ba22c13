"""Isolation: every way to fail is one typed end, and nothing of the child survives."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from freezer.errors import BuildError, CaptureError, SpecError
from pipeline.isolate import LOG_LIMIT_BYTES, End, run_isolated


def isolated(tmp_path: Path, function: Callable[..., Any], *args: Any, timeout_s: float = 60, memory_gb: float = 4) -> End:
    return run_isolated(
        function, args, folder=tmp_path, log=tmp_path / "log", timeout_s=timeout_s, memory_bytes=int(memory_gb * 1e9)
    )


def add(a: int, b: int) -> tuple[int, int]:
    print("adding")
    return a + b, os.getpid()


def raise_capture_error() -> None:
    raise CaptureError("no graph")


def raise_disk_full() -> None:
    try:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise BuildError("inductor: it did not work") from error


def raise_compiler_error() -> None:
    raise BuildError("inductor: CppCompileError: fatal error: error writing to /tmp/x.s: No space left on device")


def raise_spec_error() -> None:
    raise SpecError("no dim")


def raise_plain() -> None:
    print("about to fail")
    raise KeyError("weights")


def segfault() -> None:
    os.kill(os.getpid(), 11)


def leave() -> None:
    os._exit(7)


def hang_with_children(pid_file: str) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    Path(pid_file).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(1000)


def leave_a_child(pid_file: str) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    Path(pid_file).write_text(str(child.pid))


def eat() -> None:
    kept = []
    while True:
        kept.append(bytearray(20_000_000))


def talk() -> None:
    while True:
        print("x" * 1_000_000)


def gone(pid: int) -> bool:
    for _ in range(50):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def test_a_result_comes_back_from_another_process(tmp_path: Path) -> None:
    end = isolated(tmp_path, add, 1, 2)
    assert (end.kind, end.value[0], end.failure, end.log_tail) == ("ok", 3, None, "")
    assert end.value[1] != os.getpid()
    assert (tmp_path / "log").read_text() == "adding\n"
    assert 0 < end.wall_s < 60


@pytest.mark.parametrize(
    ("function", "kind", "failure", "message"),
    [
        (raise_capture_error, "error", "capture", "no graph"),
        (raise_spec_error, "error", "spec", "no dim"),
        (raise_disk_full, "error", "disk", "it did not work"),
        (raise_compiler_error, "error", "disk", "No space left"),
        (raise_plain, "error", "error", "KeyError: 'weights'"),
        (segfault, "crash", "crash", "died of SIGSEGV"),
        (leave, "crash", "crash", "left with exit code 7"),
    ],
)
def test_failures_are_typed(tmp_path: Path, function: Callable[[], None], kind: str, failure: str, message: str) -> None:
    end = isolated(tmp_path, function)
    assert (end.kind, end.failure) == (kind, failure)
    assert message in end.message


def test_the_end_of_the_log_comes_with_a_failure(tmp_path: Path) -> None:
    end = isolated(tmp_path, raise_plain)
    assert "about to fail" in end.log_tail
    assert end.log_tail.endswith("KeyError: 'weights'")


def test_a_hang_is_stopped_in_time_with_all_its_children(tmp_path: Path) -> None:
    end = isolated(tmp_path, hang_with_children, str(tmp_path / "pids"), timeout_s=3)
    assert (end.kind, end.failure) == ("timeout", "timeout")
    assert "raise limits.timeout_s" in end.message
    assert end.wall_s < 10
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())


SLOW_START = """
import sys
from pathlib import Path
from pipeline import isolate
from tests.pipeline.test_isolate import add

isolate.PRELOAD = ["slow_to_import"]
isolate.START_LIMIT_S = float(sys.argv[2])
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    given = {"folder": folder, "log": folder / "log", "timeout_s": 3, "memory_bytes": 4 * 10**9}
    try:
        end = isolate.run_isolated(add, (1, 2), **given)
        print(end.kind, end.wall_s < 3)
    except isolate.InfrastructureError as error:
        print(error)
"""


def slowly_started(folder: Path, imports: str, start_limit_s: float) -> str:
    """What comes of an item of 3 s in a process whose forkserver runs some Python before it starts children."""
    (folder / "slow_to_import.py").write_text(imports)
    (folder / "main.py").write_text(SLOW_START)
    env = {**os.environ, "PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}"}
    command = [sys.executable, str(folder / "main.py"), str(folder), str(start_limit_s)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_start_up_counts_against_no_limit_of_the_item(tmp_path: Path) -> None:
    assert slowly_started(tmp_path, "import time; time.sleep(4)", 60) == "ok True"


def test_a_child_that_never_starts_is_given_up(tmp_path: Path) -> None:
    found = slowly_started(tmp_path, "import time; time.sleep(5)", 1)
    assert found.startswith("a child process did not start within 1 s: its forkserver hangs")


def test_a_forkserver_that_dies_is_told(tmp_path: Path) -> None:
    found = slowly_started(tmp_path, "import os; os._exit(1)", 60)
    assert re.match(r"a child process could not be started \((EOFError|ConnectionResetError|BrokenPipeError): ", found), found


def test_children_that_are_left_behind_end_with_the_item(tmp_path: Path) -> None:
    assert isolated(tmp_path, leave_a_child, str(tmp_path / "pid")).kind == "ok"
    assert gone(int((tmp_path / "pid").read_text()))


def test_memory_without_end_is_stopped(tmp_path: Path) -> None:
    end = isolated(tmp_path, eat, memory_gb=1.2)
    assert (end.kind, end.failure) == ("memory", "memory")
    assert end.peak_bytes > 1.2e9
    assert "used more than 1.2 GB" in end.message


def test_output_without_end_is_stopped(tmp_path: Path) -> None:
    end = isolated(tmp_path, talk)
    assert (end.kind, end.failure) == ("output", "output")
    assert (tmp_path / "log").stat().st_size < 50 * LOG_LIMIT_BYTES
    assert len(end.log_tail) <= 20_000
