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
from pipeline.failures.classify import End
from pipeline.failures.policy import decide
from pipeline.worker import sandbox
from pipeline.worker.sandbox import Memory, run_isolated
from pipeline.worker.supervisor import LOG_LIMIT_BYTES
from tests.pipeline import faults

DAMAGED = "damaged.pt"
FIRST_START_S = 60
"""The first child of a process waits for its forkserver, which imports torch."""


def isolated(
    tmp_path: Path, function: Callable[..., Any], *args: Any, timeout_s: float = 60, memory_gb: float = 4, asked: bool = True
) -> End:
    memory = Memory(limit_bytes=int(memory_gb * 1e9), asked=asked)
    (tmp_path / "staging").mkdir(exist_ok=True)
    return run_isolated(function, args, folder=tmp_path / "staging", log=tmp_path / "log", timeout_s=timeout_s, memory=memory)


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


def raise_disk_full_in_one_way() -> None:
    ways = [BuildError("no graph"), RuntimeError("[enforce fail at inline_container.cc:747] . PytorchStreamWriter failed")]
    raise BuildError("no way works") from ExceptionGroup("the ways that were tried", ways)


def raise_disk_broken_in_rust() -> None:
    raise ValueError('Error while serializing: I/O error: Input/output error (os error 5) at path "/tmp/x"')


def raise_compiler_was_killed() -> None:
    raise BuildError("inductor: g++: fatal error: Killed signal terminated program cc1plus")


def raise_no_process_left() -> None:
    raise BuildError("inductor: g++: fatal error: cannot execute 'cc1plus': vfork: Resource temporarily unavailable")


def raise_no_thread_left() -> None:
    try:
        raise RuntimeError("can't start new thread")
    except RuntimeError as error:
        raise CaptureError("no graph") from error


def raise_gpu_full() -> None:
    raise BuildError("inductor: CUDA error: out of memory")


def raise_spec_error() -> None:
    raise SpecError("no dim")


def raise_plain() -> None:
    print("about to fail")
    raise KeyError("weights")


def hang_with_children(pid_file: str) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    Path(pid_file).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(1000)


def leave_a_child(pid_file: str) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    Path(pid_file).write_text(str(child.pid))


def gone(pid: int) -> bool:
    """Whether a process is gone now, not even a zombie."""
    return not psutil.pid_exists(pid)


def test_a_result_comes_back_from_another_process(tmp_path: Path) -> None:
    end = isolated(tmp_path, add, 1, 2)
    assert (end.kind, end.value[0], end.failure, end.log_tail) == ("ok", 3, None, "")
    assert end.value[1] != os.getpid()
    assert (tmp_path / "log").read_text() == "adding\n"
    assert 0 < end.wall_s < FIRST_START_S


@pytest.mark.parametrize(
    ("function", "kind", "failure", "message"),
    [
        (raise_capture_error, "error", "capture", "no graph"),
        (raise_spec_error, "error", "spec", "no dim"),
        (raise_disk_full, "error", "disk", "it did not work"),
        (raise_compiler_error, "error", "disk", "No space left"),
        (raise_compiler_was_killed, "error", "memory", "asked for more memory than its 4.0 GB .*cc1plus.*raise limits.memory_gb"),
        (raise_no_process_left, "error", "infrastructure", "vfork"),
        (raise_no_thread_left, "error", "infrastructure", "no graph"),
        (raise_gpu_full, "error", "memory", "out of memory; end what else runs on that GPU, or take a larger one"),
        (raise_plain, "error", "error", "KeyError: 'weights'"),
        (faults.raise_without_words, "error", "error", "_SpeechlessError: no message"),
        (raise_disk_broken_in_rust, "error", "disk", "os error 5"),
        (raise_disk_full_in_one_way, "error", "disk", "no way works"),
        (faults.save_beyond_the_disk, "disk", "disk", "could not write a file, and the process died of SIGABRT.* make room"),
        (faults.save_beyond_a_full_disk, "disk", "disk", "could not write a file, and the process died of SIGABRT.* make room"),
        (faults.crash_with_words_of_the_disk, "crash", "crash", "died of SIGABRT"),
        (faults.segfault, "crash", "crash", "died of SIGSEGV"),
        (faults.abort, "crash", "crash", "died of SIGABRT"),
        (faults.recurse, "crash", "crash", "died of SIGSEGV"),
        (faults.kill_itself, "crash", "crash", "died of SIGKILL"),
        (faults.leave, "crash", "crash", "left with exit code 7"),
        (faults.become_another_program, "crash", "crash", "left with exit code 0 without a result"),
        (faults.close_everything, "crash", "crash", "left with exit code 0 without a result"),
        (faults.close_its_output, "error", "error", "OSError: .*Bad file descriptor"),
        (faults.open_everything, "error", "error", "Too many open files"),
        (faults.ask_for_input, "error", "error", "EOFError"),
        (faults.return_a_lambda, "error", "error", "its result cannot be handed over: .*lambda"),
        (faults.return_what_cannot_be_read, "error", "error", "its result cannot be read: RuntimeError: not here"),
        (faults.return_much, "error", "error", "a result of more than 67 MB"),
    ],
)
def test_failures_are_typed(tmp_path: Path, function: Callable[[], None], kind: str, failure: str, message: str) -> None:
    end = isolated(tmp_path, function)
    assert (end.kind, end.failure) == (kind, failure), end
    assert re.search(message, end.message), end.message
    assert end.code is not None


def test_a_full_gpu_says_nothing_of_the_machines_memory(tmp_path: Path) -> None:
    end = isolated(tmp_path, raise_gpu_full)
    assert (end.code, end.tried_bytes) == ("CP-MEMORY-GPU", None)
    decision = decide("memory", end.code)
    assert (decision.attempts, decision.more_memory, decision.kept) == (2, False, "never")


def test_a_keeper_that_cannot_go_on_is_no_crash_of_the_item(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    end = isolated(tmp_path, add, 1, 2)
    assert (end.kind, end.code) == ("infrastructure", "CP-INFRASTRUCTURE")
    assert "the process that watches it could not go on ([Errno 21] Is a directory: " in end.message


def test_a_damaged_file_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / DAMAGED).write_bytes(b"PK\x03\x04" + bytes(1000))
    end = isolated(tmp_path, faults.load_damage, str(tmp_path / DAMAGED))
    assert (end.kind, end.failure) == ("error", "error")
    assert end.log_tail.splitlines()[-1].startswith("RuntimeError: PytorchStreamReader")


def test_the_end_of_the_log_comes_with_a_failure(tmp_path: Path) -> None:
    end = isolated(tmp_path, raise_plain)
    assert "about to fail" in end.log_tail
    assert end.log_tail.endswith("KeyError: 'weights'")


def test_a_crash_says_where_it_was(tmp_path: Path) -> None:
    tail = isolated(tmp_path, faults.segfault).log_tail
    assert "Fatal Python error: Segmentation fault" in tail
    assert f'faults.py", line {faults.segfault.__code__.co_firstlineno + 2} in segfault' in tail


def test_a_hang_is_stopped_in_time_with_all_its_children_and_says_where_it_was(tmp_path: Path) -> None:
    end = isolated(tmp_path, hang_with_children, str(tmp_path / "pids"), timeout_s=1)
    assert (end.kind, end.failure) == ("timeout", "timeout")
    assert "raise limits.timeout_s" in end.message
    assert 1 <= end.wall_s < 5
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())
    assert "in hang_with_children" in end.log_tail
    assert end.log_tail.endswith("coldpress: stopped (timeout); still running: sleep 1000")


@pytest.mark.parametrize("function", [faults.spin, faults.stop_itself])
def test_what_ignores_signals_or_is_stopped_ends_in_time(tmp_path: Path, function: Callable[[], None]) -> None:
    end = isolated(tmp_path, function, timeout_s=0.5)
    assert (end.kind, end.failure) == ("timeout", "timeout")
    assert end.wall_s < 5


def test_a_compiler_that_hangs_is_named(tmp_path: Path) -> None:
    compiler = tmp_path / "slow-g++"
    compiler.write_text("#!/bin/sh\ntrap '' TERM\nsleep 1000 &\nsleep 1000\n")
    compiler.chmod(0o755)
    end = isolated(tmp_path, faults.hang_in_a_compiler, str(compiler), timeout_s=1)
    assert end.kind == "timeout"
    assert f"still running: /bin/sh {compiler} -O2 x.cpp; sleep 1000; sleep 1000" in end.log_tail


@pytest.mark.parametrize("then", ["return", "hang", "crash"])
def test_what_leaves_its_session_and_its_parent_is_ended_too(tmp_path: Path, then: str) -> None:
    end = isolated(tmp_path, faults.detach, str(tmp_path / "pids"), then, timeout_s=1.5)
    assert end.kind == {"return": "ok", "hang": "timeout", "crash": "crash"}[then]
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    assert all(gone(int(pid)) for pid in pids)


def test_a_child_that_kills_its_keeper_is_a_crash_and_leaves_nothing(tmp_path: Path) -> None:
    end = isolated(tmp_path, faults.kill_its_parent, str(tmp_path / "pids"))
    assert (end.kind, end.failure) == ("crash", "crash")
    assert "the process that watches it was killed" in end.message
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())


SLOW_START = """
import sys
from pathlib import Path
from pipeline.worker import sandbox
from tests.pipeline.worker.test_sandbox import add

sandbox.PRELOAD = ["slow_to_import"]
sandbox.START_LIMIT_S = float(sys.argv[2])
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    given = {"folder": folder, "log": folder / "log", "timeout_s": 3, "memory": sandbox.Memory(limit_bytes=4 * 10**9)}
    try:
        end = sandbox.run_isolated(add, (1, 2), **given)
        print(end.kind, end.wall_s < 3)
    except sandbox.InfrastructureError as error:
        print(error)
"""


def slowly_started(folder: Path, imports: str, start_limit_s: float) -> str:
    """What comes of an item of 3 s in a process whose forkserver runs some Python before it starts children."""
    (folder / "slow_to_import.py").write_text(imports)
    (folder / "main.py").write_text(SLOW_START)
    env = {**os.environ, "PYTHONPATH": f"{folder}:{Path(__file__).parents[3]}"}
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


def test_the_first_that_comes_back_from_a_fork_is_the_result(tmp_path: Path) -> None:
    end = isolated(tmp_path, faults.return_twice)
    assert end.kind == "ok"
    assert end.value > 0, "the parent's"


@pytest.mark.parametrize("function", [faults.eat, faults.eat_in_children])
def test_memory_without_end_is_stopped(tmp_path: Path, function: Callable[[], None]) -> None:
    end = isolated(tmp_path, function, memory_gb=1.2)
    assert (end.kind, end.failure, end.code) == ("memory", "memory", "CP-MEMORY")
    assert 1.2e9 < end.peak_bytes < 4e9
    assert end.tried_bytes == 1.2e9
    assert "used more than 1.2 GB; raise limits.memory_gb" in end.message


def test_much_memory_at_once_is_refused_before_it_is_taken(tmp_path: Path) -> None:
    end = isolated(tmp_path, faults.eat_at_once, 12 * 10**9, memory_gb=1.2, asked=False)
    assert (end.kind, end.failure, end.code) == ("error", "memory", "CP-MEMORY-NODE")
    assert end.peak_bytes < 1.2e9, "nothing of it was ever resident"
    assert re.search(r"asked for more memory than its 1.2 GB and some spare \(MemoryError: .*\), what one item may", end.message)
    assert "kept = bytearray(num_bytes)" in end.log_tail, "the line that asked for it"


def test_a_child_is_taken_first_and_leaves_no_core(tmp_path: Path) -> None:
    core, data, score = isolated(tmp_path, faults.limits, memory_gb=3).value
    assert (core, score) == (0, 1000)
    assert data == Memory(limit_bytes=3 * 10**9).data_bytes
    memory = Memory(limit_bytes=3 * 10**9, bounds_requests=False)
    end = run_isolated(faults.limits, (), folder=tmp_path, log=tmp_path / "log", timeout_s=60, memory=memory)
    assert end.value[1] == -1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (faults.kill_itself, "ran out of memory when it used .* GB \\(the kernel ended it\\)"),
        (raise_capture_error, "\\(the kernel ended one of its processes: no graph\\)"),
    ],
)
def test_what_the_kernel_kills_for_memory_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: Callable[[], None], message: str
) -> None:
    kills = iter((3, 4))
    monkeypatch.setattr(sandbox, "_oom_kills", lambda: next(kills))
    end = isolated(tmp_path, function)
    assert (end.failure, end.code) == ("memory", "CP-MEMORY-NODE")
    assert re.search(message, end.message), end.message


def test_the_kernels_count_of_kills_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 17\noom_kill_x 3\n")
    monkeypatch.setattr(sandbox, "VMSTAT", tmp_path / "vmstat")
    assert sandbox._oom_kills() == 17
    monkeypatch.setattr(sandbox, "VMSTAT", tmp_path / "nothing")
    assert sandbox._oom_kills() == 0


def test_forks_without_end_are_stopped(tmp_path: Path) -> None:
    before = set(psutil.pids())
    end = isolated(tmp_path, faults.fork_for_ever)
    assert (end.kind, end.failure, end.code) == ("processes", "processes", "CP-PROCESSES")
    assert re.search(r"had \d+ processes at a time, expected at most 100", end.message)
    new = [process for process in psutil.process_iter(["cmdline"]) if process.pid not in before]
    assert sum("forkserver" in " ".join(process.info["cmdline"] or []) for process in new) <= 1


def test_output_without_end_is_stopped_and_fills_no_disk(tmp_path: Path) -> None:
    end = isolated(tmp_path, faults.talk)
    assert (end.kind, end.failure) == ("output", "output")
    assert (tmp_path / "log").stat().st_size == LOG_LIMIT_BYTES
    assert len(end.log_tail) <= 20_000


def test_output_within_the_limit_is_kept_whole(tmp_path: Path) -> None:
    assert isolated(tmp_path, faults.talk, 30_000_000).kind == "ok"
    assert (tmp_path / "log").stat().st_size == 30_000_000
