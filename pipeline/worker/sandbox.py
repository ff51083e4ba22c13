"""Run a function in a child process with limits, so that a crash, a hang or an exception is one
typed result.

The child is forked by a forkserver that has imported torch, which takes half a second instead of
several. The forkserver inherits the environment of this process, so the instruction-set limits of a
device class hold in every child. A supervisor process between the two (supervisor.py) watches the
limits and ends everything that the child started.

multiprocessing's own forkserver is not used: its socket has a name in a temporary folder, which
remains when a worker is killed, it runs the main module again, and it waits forever for a
forkserver that hangs.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

from freezer.errors import InfrastructureError
from freezer.freezing.diagnostics import NOT_WRITTEN, ROOM
from pipeline.failures import CODES, GPU_MEMORY, NODE_MEMORY, coded_failure
from pipeline.records import Failure
from pipeline.worker.child import End, received
from pipeline.worker.supervisor import LOG_LIMIT_BYTES, MAX_PROCESSES, Bounds, SupervisorReport
from pipeline.workspace import KILL_WAIT_S, descendants, kill, process_started

PRELOAD = [
    "torch",
    "torch._inductor.compile_fx",
    "freezer.freezing.candidates.builder",
    "freezer.freezing.judging.session",
    "freezer.freezing.packaging.writer",
]
START_LIMIT_S = 300.0
"""Limit for the start of a child. The first one of a worker waits until its forkserver has imported
torch: seconds, or a minute from a cold disk. That time does not count against the limits of the
item."""
LOG_TAIL_LINES = 20
_TAIL_BYTES = 20_000
_LINE_CHARACTERS = 400
_TRACE = "(most recent call first):"
"""First words of a traceback by faulthandler."""
VMSTAT = Path("/proc/vmstat")

STOPPED = {
    "timeout": (
        "did not end within {timeout_s:g} s, or one step with a candidate within half of that;"
        " raise limits.timeout_s"
    ),
    "output": (
        f"printed more than {LOG_LIMIT_BYTES / 1e6:.0f} MB; print less while the model loads and"
        " runs"
    ),
    "processes": (
        f"had more than {MAX_PROCESSES} processes at a time; start fewer while the model loads and"
        " runs"
    ),
}
"""Message by the limit that a child passed; for memory see `_over_memory`."""

LOG = "child.log"
"""File of a staging folder with the output of its child."""

_starting = threading.Lock()


def run_isolated(
    function: Callable[..., object],
    args: tuple[object, ...],
    *,
    folder: Path,
    bounds: Bounds,
    preload: str = "",
) -> End:
    """Run a function in a child process. Nothing that the child starts survives this call.

    Args:
        function: importable by name, not from the main module; its result must pickle. A generator
            function yields parts.
        args: arguments that pickle.
        folder: for the child's temporary files, and its output, which is appended to LOG there.
        bounds: its limits.
        preload: a further module to import before the fork, once for all later children.

    Raises:
        InfrastructureError: no child could be started.
    """
    log = folder / LOG
    oom_kills = _oom_kills()
    report = _supervised(pickle.dumps((function, args)), log, bounds, preload)
    starved = _oom_kills() > oom_kills
    if report is None:
        how = "its supervisor was killed, by the kernel or by the model's own code"
        failed = _starved(how, 0) if starved else coded_failure("crash", how)
        return End(failure=replace(failed, log_tail=log_tail(log)))
    parts, end = received(report.result)
    failure = _failure_in(report, end, bounds, starved=starved)
    return replace(
        end or End(),
        parts=parts,
        failure=failure and _with_log(failure, log),
        in_hand=report.in_hand,
        peak_bytes=report.peak_bytes,
        wall_s=report.wall_s,
    )


def _with_log(failure: Failure, log: Path) -> Failure:
    if failure.kind == "crash" and re.search(NOT_WRITTEN, _last_of(log)):
        failure = coded_failure(
            "disk", f"torch could not write a file, and {failure.message}; {ROOM}"
        )
    return replace(failure, log_tail=log_tail(log))


def _supervised(
    payload: bytes,
    log: Path,
    bounds: Bounds,
    preload: str,
) -> SupervisorReport | None:
    """Run a child to its end, and return its supervisor's report; None if that was killed."""
    server, supervisor, pid = _fork_supervisor(preload)
    report: SupervisorReport | None = None
    try:
        supervisor.send((payload, log, bounds))
        report = _receive(supervisor, None)
    finally:
        supervisor.close()  # a supervisor that still runs ends everything now
        _await_end(pid)
        if report is None:  # what its child started may be stopped, with a share of the machine
            left = descendants(server)
            kill(left)
            for orphan in left:
                _await_end(orphan)
    return report


class _Forkserver:
    """A process that forks supervisors once it has imported PRELOAD. It ends with this process."""

    current: ClassVar[_Forkserver | None] = None

    def __init__(self) -> None:
        self.requests, theirs = socket.socketpair()
        with theirs:
            # Ray extends the path of its workers alone.
            code = (
                f"import sys; sys.path[:] = {sys.path}; from pipeline.worker.supervisor import"
                " forkserver; "
            )
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"{code}forkserver({theirs.fileno()}, {PRELOAD})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    @classmethod
    def running(cls) -> _Forkserver:
        """Return the forkserver of this process, which is started again if it died."""
        with _starting:
            if cls.current is not None and cls.current.process.poll() is not None:
                cls.current.requests.close()
                cls.current = None
            if cls.current is None:
                cls.current = cls()
            return cls.current

    def fork(self, preload: str) -> Connection:
        """Request a supervisor, forked once a module is imported; return the connection to it.

        Raises:
            OSError: the forkserver died.
        """
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            socket.send_fds(self.requests, [f"{preload}\n".encode()], [theirs.fileno()])
        return ours


def _fork_supervisor(preload: str) -> tuple[int, Connection, int]:
    """Start a supervisor; return the process id of its forkserver, the connection to it, and its
    own process id.

    Raises:
        InfrastructureError: it did not start within START_LIMIT_S, or its forkserver died.
    """
    server = _Forkserver.running()
    pid = None
    with suppress(OSError):
        supervisor = server.fork(preload)
        pid = _receive(supervisor, START_LIMIT_S)
    if pid is None:
        server.process.kill()
        server.process.wait()
        raise InfrastructureError(
            f"a child process did not start within {START_LIMIT_S:g} s, or its forkserver died,"
            " most likely importing torch; check this node's disk and memory"
        )
    return server.process.pid, supervisor, pid


def _receive(supervisor: Connection, limit_s: float | None) -> Any:
    """Return the next message of a supervisor; None if it died or sent nothing in time."""
    with suppress(EOFError, OSError):
        if supervisor.poll(limit_s):
            return supervisor.recv()
    return None


def _await_end(pid: int) -> None:
    """Wait until a supervisor has ended. Kill one that does not, with everything below it."""
    deadline = time.monotonic() + KILL_WAIT_S + 10
    while process_started(pid) is not None:
        if time.monotonic() > deadline:
            kill([pid, *descendants(pid)])
            break
        time.sleep(0.01)


def _failure_in(
    report: SupervisorReport,
    end: End | None,
    bounds: Bounds,
    *,
    starved: bool,
) -> Failure | None:
    """Return why a child has no value; None if it has one.

    Args:
        report: report of its supervisor.
        end: what the child sent; None if it died before.
        bounds: limits of the child.
        starved: whether the OOM killer ran meanwhile.
    """
    if report.error is not None:
        return report.error
    if report.stopped == "memory":
        return _over_memory(f"used more than {bounds.memory_bytes / 1e9:.1f} GB", bounds)
    if report.stopped is not None:
        limit_s = bounds.timeout_s
        message = STOPPED[report.stopped].format(timeout_s=limit_s)
        tried_s = limit_s if report.stopped == "timeout" else None
        return replace(coded_failure(report.stopped, message), tried_s=tried_s)
    if end is None:
        code = None if report.status is None else os.waitstatus_to_exitcode(report.status)
        if code == -signal.SIGKILL and starved:
            return _starved("the kernel killed it", report.peak_bytes)
        how = f"exited with code {code}"
        if code is not None and code < 0:
            how = f"died of {signal.Signals(-code).name}"
        message = f"the process {how} without a result; the end of its log may say why"
        return coded_failure("crash", message)
    if end.failure is not None and end.failure.kind == "memory":
        return _without_memory(end.failure, bounds)
    return end.failure


def _without_memory(failure: Failure, bounds: Bounds) -> Failure:
    """Return the failure of a child whose request for memory was refused: beyond the machine's, or
    its limit plus spare.
    """
    if failure.code == GPU_MEMORY:
        remedy = "end other processes on that GPU, or use a larger GPU or a smaller batch"
        return replace(failure, message=f"{failure.message}; {remedy}")
    limit = f"its limit of {bounds.memory_bytes / 1e9:.1f} GB plus spare"
    return _over_memory(f"requested more memory than {limit} ({failure.message})", bounds)


def _over_memory(what: str, bounds: Bounds) -> Failure:
    code = CODES["memory"]
    remedy = "; raise limits.memory_gb"
    if not bounds.asked:
        code = NODE_MEMORY
        remedy = ", the share of this machine for one item; use a larger worker"
    return Failure(
        kind="memory",
        code=code,
        message=what + remedy,
        tried_bytes=bounds.memory_bytes,
    )


def _starved(how: str, peak_bytes: int) -> Failure:
    """Return the failure of a child whose process the kernel's OOM killer took."""
    used = f"this machine ran out of memory when it used {peak_bytes / 1e9:.1f} GB ({how})"
    return Failure(
        kind="memory",
        code=NODE_MEMORY,
        message=f"{used}; run less next to it, or use a larger worker",
        tried_bytes=peak_bytes,
    )


def _oom_kills() -> int:
    """Return how many processes the OOM killer has killed since the boot; 0 if the kernel does not
    count them.
    """
    with suppress(OSError):
        count = re.search(r"^oom_kill (\d+)$", VMSTAT.read_text(), re.MULTILINE)
        return int(count[1]) if count else 0
    return 0


def log_tail(log: Path) -> str:
    """Return the last lines of a log; of a long traceback at its end, the innermost calls."""
    lines = [line[:_LINE_CHARACTERS] for line in _last_of(log).splitlines()]
    traces = [number for number, line in enumerate(lines) if line.endswith(_TRACE)]
    if traces and len(lines) - traces[-1] > LOG_TAIL_LINES:
        lines[traces[-1] + LOG_TAIL_LINES // 2 : -1] = []
    return "\n".join(lines[-LOG_TAIL_LINES:])


def _last_of(log: Path) -> str:
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")
    return ""
