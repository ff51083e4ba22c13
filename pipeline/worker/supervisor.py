"""The supervisor of one item: a process between a worker and the child. It watches limits, and ends with both.

    worker -> forkserver -> supervisor -> child -> compilers, and anything else the model starts

The supervisor holds the child's output and result in files without a name in memory (memfd), and adopts every orphan of the
child. It ends all processes when the child has ended, has passed a limit, or when the worker is gone (also by kill -9). It runs
none of the item's code.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from freezer.files.atomic import make_folder, retried
from pipeline.worker.child import run_child
from pipeline.workspace.processes import (
    children,
    command_of,
    descendants,
    kill_descendants,
    oom_score,
    reap,
    set_subreaper,
    tree_bytes,
)
from pipeline.workspace.staging import remove_tree

POLL_S = 0.1
LOG_LIMIT_BYTES = 64 * 1024 * 1024
RESULT_LIMIT_BYTES = 64 * 1024 * 1024
CHUNK_BYTES = 1024 * 1024
"""Copied to the log at a time."""
MAX_PROCESSES = 100
"""Limit of processes of one item at a time. A build runs a handful of compilers."""
FREE_BYTES = 1_000_000_000
"""Free space to keep on the disk of the staging folder, or 2% of a small disk. If less is left, an item that uses more is
stopped."""
TRACE_WAIT_S = 0.3
"""Time for a child that timed out to print its traceback."""

Stop = Literal["timeout", "memory", "output", "processes", "disk", "result", "worker", "supervisor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Limits of a child.

    Attributes:
        timeout_s: wall time.
        memory_bytes: resident memory of the child and everything it starts.
        data_bytes: private memory that one process may map; None for CUDA, which maps more than the machine has.
    """

    timeout_s: float
    memory_bytes: int
    data_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorReport:
    """Report of a supervisor to its worker.

    Attributes:
        stopped: limit that was passed; None if the child ended by itself.
        status: wait status of the child; None if it could not be reaped.
        result: bytes that the child sent.
        error: errno and text of an error of the supervisor itself.
        num_processes: number of processes when it was stopped.
        left: processes that could not be killed.
    """

    stopped: Stop | None
    status: int | None
    result: bytes | None
    peak_bytes: int
    wall_s: float
    error: tuple[int, str] = (0, "")
    num_processes: int = 0
    left: tuple[int, ...] = ()


def supervise(payload: bytes, folder: str, log: str, bounds: Bounds, worker: Connection) -> None:
    """In the supervisor: run the child to its end, and report to the worker."""
    os.setsid()
    set_subreaper(True)
    oom_score(0)  # the OOM killer takes the child and its compilers first
    _let_go_of_the_forkserver()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    worker.send("started")
    kept: SupervisorReport | None = None
    try:
        with retried(lambda: open(log, "ab", buffering=0)) as file, _scratch(Path(folder)) as scratch:
            watch = _ChildWatch(Path(folder), file, bounds, worker)
            kept = watch.run(payload, scratch)
            while retried(watch.copy_log):
                pass
    except (OSError, subprocess.SubprocessError) as error:  # a full disk, or no free process: not a fault of the item
        kill_descendants()
        why = ((error.errno or 0) if isinstance(error, OSError) else 0, str(error))
        kept = kept or SupervisorReport(stopped="supervisor", status=None, result=None, peak_bytes=0, wall_s=0.0, error=why)
    with contextlib.suppress(OSError):  # the worker is gone
        worker.send(kept)
    os._exit(0)


def _let_go_of_the_forkserver() -> None:
    """Close what keeps the forkserver of a dead worker alive. A child that needs a forkserver starts its own."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
    server.__init__()


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Make the child's folder for temporary files, and yield it by a handle of this process.

    Staging folders have names of over 100 characters, and the path of a socket, as multiprocessing makes them, has at most 108.
    """
    make_folder(folder / "tmp")
    handle = os.open(folder / "tmp", os.O_PATH | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{handle}")
    finally:
        os.close(handle)
        remove_tree(folder / "tmp")


class _ChildWatch:
    """Watches one child."""

    def __init__(self, folder: Path, log: FileIO, bounds: Bounds, worker: Connection) -> None:
        self._folder, self._log, self._bounds, self._worker = folder, log, bounds, worker
        self._output, self._result = os.memfd_create("output"), os.memfd_create("result")
        fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_APPEND)
        self._peak = self._num_processes = self._logged = 0
        self._status: int | None = None

    def run(self, payload: bytes, scratch: Path) -> SupervisorReport:
        """Run the child to its end, then end everything below this process."""
        supervisor = os.getpid()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._worker.fileno())
            run_child(payload, supervisor, scratch, self._output, self._result, self._bounds.data_bytes)
        self._started = time.monotonic()
        stopped = self._until_the_end()
        wall_s = time.monotonic() - self._started
        if stopped in ("timeout", "memory"):  # not with too many processes: looking at them takes too long
            self._note_what_runs(stopped)
        self._take(kill_descendants())
        result = os.pread(self._result, RESULT_LIMIT_BYTES + 1, 0)
        if stopped is None:
            stopped = self._passed_size()
        return SupervisorReport(
            stopped=stopped,
            status=self._status,
            result=result or None,
            peak_bytes=self._peak,
            wall_s=wall_s,
            num_processes=self._num_processes,
            left=tuple(children(os.getpid())),
        )

    def copy_log(self) -> int:
        """Append what the child has printed since the last call to the log; return the number of bytes, 0 at the end."""
        content = os.pread(self._output, min(CHUNK_BYTES, LOG_LIMIT_BYTES - self._logged), self._logged)
        written = self._log.write(content)
        self._logged += written
        return written

    def _until_the_end(self) -> Stop | None:
        """Wait for the child, and check its limits every POLL_S seconds; return the limit that was passed, or None."""
        poller = select.poll()
        poller.register(self._worker.fileno(), select.POLLHUP)
        poller.register(os.pidfd_open(self._child), select.POLLIN)
        while self._status is None:
            if self._worker.fileno() in dict(poller.poll(POLL_S * 1000)):
                return "worker"
            self._take(reap())
            with contextlib.suppress(OSError):  # copied again at the end, where a full disk is reported
                self.copy_log()
            if self._status is None and (stopped := self._passed()) is not None:
                return stopped
        return None

    def _passed(self) -> Stop | None:
        """Return the limit that is passed now."""
        pids = descendants(os.getpid())
        self._peak = max(self._peak, tree_bytes(self._child, pids))
        self._num_processes = len(pids)
        if self._peak > self._bounds.memory_bytes:
            return "memory"
        if self._num_processes > MAX_PROCESSES:
            return "processes"
        if time.monotonic() - self._started > self._bounds.timeout_s:
            return "timeout"
        return self._passed_size() or ("disk" if _fills_the_disk(self._folder) else None)

    def _passed_size(self) -> Stop | None:
        if os.fstat(self._output).st_size > LOG_LIMIT_BYTES:
            return "output"
        return "result" if os.fstat(self._result).st_size > RESULT_LIMIT_BYTES else None

    def _take(self, ended: dict[int, int]) -> None:
        if self._child in ended:
            self._status = ended[self._child]

    def _note_what_runs(self, stopped: Stop) -> None:
        """Log the processes that were running, and on a timeout the child's traceback."""
        if stopped == "timeout":
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGUSR2)  # faulthandler prints the traceback, see child.py
            time.sleep(TRACE_WAIT_S)
        started = [pid for pid in descendants(os.getpid()) if pid != self._child]
        several = f" and {len(started) - 3} more" if len(started) > 3 else ""
        commands = "; ".join(command_of(pid)[:200] for pid in started[:3])
        what = f"{commands}{several}" if started else "no process but the item's own"
        os.write(self._output, f"\ncoldpress: stopped ({stopped}); still running: {what}\n".encode())


def _fills_the_disk(folder: Path) -> bool:
    """Whether the disk of a folder is nearly full and the folder uses more than the space that is left."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False  # the child removed it
    least = min(FREE_BYTES, disk.f_blocks * disk.f_frsize // 50)
    return disk.f_bavail * disk.f_frsize < least and _uses_more(folder, least)


def _uses_more(folder: Path, num_bytes: int) -> bool:
    held = 0
    for above, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                held += os.lstat(f"{above}/{name}").st_blocks * 512
        if held > num_bytes:
            return True
    return False
