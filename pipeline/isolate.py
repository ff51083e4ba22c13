"""Isolation: a function in a child process with limits, so that a crash, a hang or an exception is one typed result.

The child is forked from a forkserver that has torch imported already, which takes half a second instead of several. The forkserver
inherits the environment of this process, so a class's instruction-set limits, set when the worker started, hold in every child.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal

import psutil

from freezer.errors import ColdpressError, FreezeError, InfrastructureError, StoreError, UsageError

PRELOAD = ["torch", "torch._inductor.compile_fx", "freezer.build", "freezer.judge", "freezer.assemble"]
START_LIMIT_S = 300.0
"""Until a child must have started. The first one of a worker waits until its forkserver has imported torch, which takes seconds, or
a minute from a cold disk; that is no item's fault, and counts against none of its limits."""
POLL_S = 0.1
LOG_LIMIT_BYTES = 64 * 1024 * 1024
LOG_TAIL_LINES = 20
_PR_SET_PDEATHSIG = 1

CODES = {
    "timeout": "CP-TIMEOUT",
    "memory": "CP-MEMORY",
    "crash": "CP-CRASH",
    "output": "CP-LOG-SIZE",
    "disk": "CP-DISK",
    "infrastructure": "CP-INFRASTRUCTURE",
}
"""Codes of failures of the circumstances, which no exception of ours stands for."""

EndKind = Literal["ok", "error", "timeout", "memory", "crash", "output"]


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How a child ended.

    Attributes:
        kind: `ok`; `error`: it raised; the others: it was stopped, or died.
        value: what the function returned.
        failure: the type of the failed outcome: a FreezeError's kind, or `kind` itself.
        code: of the failure, in docs/errors.md.
        message: one sentence for people.
        log_tail: the last lines that the child printed.
        peak_bytes: the largest resident memory of the child and its own children that was seen.
        wall_s: from the moment it had started to its end.
    """

    kind: EndKind
    value: Any = None
    failure: str | None = None
    code: str | None = None
    message: str = ""
    log_tail: str = ""
    peak_bytes: int = 0
    wall_s: float = 0.0


def run_isolated(
    function: Callable[..., Any], args: tuple[Any, ...], *, folder: Path, log: Path, timeout_s: float, memory_bytes: int
) -> End:
    """Run a function in a child process of its own process group; nothing of the child survives this call.

    Args:
        function: importable by name; its result must pickle.
        args: that pickle.
        folder: for the result file.
        log: where all that the child prints goes.
        timeout_s: wall time, from the moment that the child has started.
        memory_bytes: resident memory of the child and its children together.

    Raises:
        InfrastructureError: no child could be started.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    result = folder / "result.pickle"
    log.parent.mkdir(parents=True, exist_ok=True)
    process = context.Process(target=_child, args=(function, args, str(result), str(log), os.getpid()), daemon=False)
    _start(process)
    started = time.monotonic()
    try:
        stopped, peak = _watch(process, log, started + timeout_s, memory_bytes)
    finally:
        _kill_group(process)
    wall_s = time.monotonic() - started
    end = _ended(process, result, stopped, timeout_s=timeout_s, memory_bytes=memory_bytes)
    result.unlink(missing_ok=True)
    process.close()
    tail = "" if end.kind == "ok" else log_tail(log)
    return End(
        kind=end.kind,
        value=end.value,
        failure=end.failure,
        code=end.code,
        message=end.message,
        log_tail=tail,
        peak_bytes=peak,
        wall_s=wall_s,
    )


def _start(process: ForkServerProcess) -> None:
    """Start a child. A forkserver that hangs while it starts up would be waited for without end, so a thread waits for it.

    Raises:
        InfrastructureError: the child did not start within START_LIMIT_S, or its forkserver died.
    """
    failed: list[BaseException] = []
    given_up = threading.Event()

    def start() -> None:
        try:
            process.start()
        except BaseException as error:
            failed.append(error)
        if given_up.is_set() and process.pid is not None:
            process.kill()

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    try:
        thread.join(START_LIMIT_S)
    finally:
        if thread.is_alive():
            given_up.set()
    if given_up.is_set():
        raise InfrastructureError(
            f"a child process did not start within {START_LIMIT_S:g} s: its forkserver hangs, most likely importing torch; look at "
            "this node's disk and memory"
        )
    if failed:
        why = f"{type(failed[0]).__name__}: {failed[0]}"
        raise InfrastructureError(f"a child process could not be started ({why}); look at this node's memory") from failed[0]


def log_tail(log: Path) -> str:
    """The last lines of a log."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 20_000))
        lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])
    return ""


def _watch(process: ForkServerProcess, log: Path, deadline: float, memory_bytes: int) -> tuple[EndKind | None, int]:
    """Wait for the end, or for a limit that is passed; which one, and the peak memory."""
    peak = 0
    while True:
        process.join(POLL_S)
        if process.exitcode is not None:
            return None, peak
        peak = max(peak, _tree_bytes(process.pid))
        if peak > memory_bytes:
            return "memory", peak
        if time.monotonic() > deadline:
            return "timeout", peak
        with contextlib.suppress(OSError):
            if log.stat().st_size > LOG_LIMIT_BYTES:
                return "output", peak


def _tree_bytes(pid: int | None) -> int:
    """Resident memory of a process and of all that it started; a copy of it that has not begun its own program is not counted."""
    total = 0
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        own = parent.memory_info()
        total += own.rss
        for process in parent.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found = process.memory_info()
                total += found.rss if found.vms != own.vms else 0
    return total


def _kill_group(process: ForkServerProcess) -> None:
    """Kill the child, if it lives, and everything that it started."""
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.exitcode is None:
            process.kill()
    process.join(10)


def _ended(process: ForkServerProcess, result: Path, stopped: EndKind | None, *, timeout_s: float, memory_bytes: int) -> End:
    if stopped == "timeout":
        return _stopped("timeout", f"did not end within {timeout_s:g} s; raise limits.timeout_s")
    if stopped == "memory":
        return _stopped("memory", f"used more than {memory_bytes / 1e9:.1f} GB; raise limits.memory_gb")
    if stopped == "output":
        return _stopped("output", f"printed more than {LOG_LIMIT_BYTES / 1e6:.0f} MB; print less while the model loads and runs")
    if result.exists():
        end: End = pickle.loads(result.read_bytes())  # written by _child, in a folder of this task alone
        return end
    code = process.exitcode
    how = f"died of {signal.Signals(-code).name}" if code is not None and code < 0 else f"left with exit code {code}"
    return _stopped("crash", f"the process {how} without a result; the end of its log may say why")


def _stopped(kind: EndKind, message: str) -> End:
    return End(kind=kind, failure=kind, code=CODES[kind], message=message)


def _child(function: Callable[..., Any], args: tuple[Any, ...], result: str, log: str, owner: int) -> None:
    """In the child: own process group, death with the parent, output into the log, the result into a file."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not psutil.pid_exists(owner):
        os._exit(1)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    try:
        end = End(kind="ok", value=function(*args))
    except BaseException as error:  # whatever the user's code raises is this item's failure
        traceback.print_exc()
        end = End(kind="error", failure=failure_of(error), code=code_of(error), message=_message(error))
    partial = Path(f"{result}.partial")
    partial.write_bytes(pickle.dumps(end))
    os.replace(partial, result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no atexit handlers, no destructors of the user's code


def failure_of(error: BaseException) -> str:
    """The type of the failed outcome that an exception makes."""
    if _is_of_the_disk(error):
        return "disk"
    if isinstance(error, FreezeError):
        return error.kind
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, InfrastructureError | StoreError):
        return "infrastructure"
    return "spec" if isinstance(error, UsageError) else "error"


def code_of(error: BaseException) -> str:
    """The code of the failed outcome that an exception makes."""
    if isinstance(error, ColdpressError) and not _is_of_the_disk(error):
        return error.code
    return CODES.get(failure_of(error), ColdpressError.code)


def _is_of_the_disk(error: BaseException | None) -> bool:
    """Whether a full or broken disk is behind an exception; compilers tell of it in their output alone."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            return True
        if os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _message(error: BaseException) -> str:
    if isinstance(error, ColdpressError):
        return str(error)
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[-1]}"
