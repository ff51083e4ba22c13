"""The keeper of one item: a process between a worker and the child that does the work. It watches limits, and outlives nobody.

    worker -> forkserver -> keeper -> child -> compilers, and whatever else the model starts

The keeper alone holds the pipes of the child's output and result, adopts every orphan of the child, and ends all of them when the
child has ended, has passed a limit, or when the worker is gone (by kill -9, too). It runs no code of the item.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
from pipeline.workspace.staging import leads_to_abandoned, remove_tree

POLL_S = 0.1
LOG_LIMIT_BYTES = 64 * 1024 * 1024
RESULT_LIMIT_BYTES = 64 * 1024 * 1024
MAX_PROCESSES = 100
"""Of one item at a time. A build runs a handful of compilers."""
FREE_BYTES = 1_000_000_000
"""Left on the disk of the staging folder, or 2% of a small one. An item that holds more than this when less is left is stopped."""
TRACE_WAIT_S = 0.3
"""How long a child that is stopped for its time may take to say where it is."""
SCRATCH = "coldpress-tmp-"
_CHUNK = 1 << 20

Stop = Literal["timeout", "memory", "output", "processes", "disk", "result", "worker", "keeper"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What a child may use.

    Attributes:
        timeout_s: wall time.
        memory_bytes: resident memory of the child and all that it starts.
        data_bytes: private memory that one process may ask for at all; None of CUDA's, which reserve more than there is.
    """

    timeout_s: float
    memory_bytes: int
    data_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorReport:
    """What a keeper tells the worker: plain values alone.

    Attributes:
        stopped: the bound that was passed; None of a child that ended by itself.
        status: as os.waitpid gives it; None where the child could not be reaped.
        result: what the child handed over, whole; or None.
        error: number and text of what stopped the keeper itself.
        num_processes: how many there were when it was stopped.
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


def keep(payload: bytes, folder: str, log: str, bounds: Bounds, worker: Connection) -> None:
    """In the keeper: run the child to its end, and tell the worker."""
    os.setsid()
    set_subreaper(True)
    oom_score(0)  # the child and its compilers go first, so that somebody is left to tell
    _let_go_of_the_forkserver()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    worker.send("started")
    kept: SupervisorReport | None = None
    try:
        with _scratch(Path(folder)) as scratch:
            kept = _ChildWatch(payload, Path(folder), scratch, log, bounds, worker).run()
    except (OSError, subprocess.SubprocessError) as error:  # a full disk, no process left to be had; no fault of the item
        kill_descendants()
        why = ((error.errno or 0) if isinstance(error, OSError) else 0, str(error))
        kept = kept or SupervisorReport(stopped="keeper", status=None, result=None, peak_bytes=0, wall_s=0.0, error=why)
    with contextlib.suppress(OSError):  # the worker is gone
        worker.send(kept)
    os._exit(0)


def _let_go_of_the_forkserver() -> None:
    """Hold nothing that keeps a forkserver of a dead worker alive; a child that wants a forkserver starts its own, below itself."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
    server.__init__()


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """The child's folder for temporary files, within `folder`, under a name short enough for the sockets that are made there."""
    make_folder(folder / "tmp")
    base = Path(tempfile.gettempdir())
    for old in base.glob(f"{SCRATCH}*"):  # of keepers that were killed together with their worker
        with contextlib.suppress(OSError):
            if old.lstat().st_uid == os.getuid() and leads_to_abandoned(old, folder):
                old.unlink()
    link = Path(tempfile.mktemp(prefix=SCRATCH, dir=base))
    try:
        link.symlink_to((folder / "tmp").absolute())
    except OSError:  # a full disk takes no long link; what makes no socket does without a short name
        link = (folder / "tmp").absolute()
    try:
        yield link
    finally:
        if link.is_symlink():
            link.unlink(missing_ok=True)
        remove_tree(folder / "tmp")


class _ChildWatch:
    """One child under watch."""

    def __init__(self, payload: bytes, folder: Path, scratch: Path, log: str, bounds: Bounds, worker: Connection) -> None:
        self._folder, self._bounds, self._worker = folder, bounds, worker
        self._log = retried(lambda: os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
        self._logged = 0
        self._result = bytearray()
        self._peak = 0
        self._num_processes = 0
        self._status: int | None = None
        output, child_output = os.pipe()
        result, child_result = os.pipe()
        keeper = os.getpid()
        self._child = os.fork()
        if self._child == 0:
            for handle in (self._log, output, result, worker.fileno()):
                os.close(handle)
            run_child(payload, keeper, scratch, child_output, child_result, bounds.data_bytes)
        os.close(child_output)
        os.close(child_result)
        self._started = time.monotonic()
        self._output, self._result_pipe = output, result
        self._open = {output, result}
        for handle in self._open:
            os.set_blocking(handle, False)

    def run(self) -> SupervisorReport:
        """Watch until the end, then end everything."""
        stopped = self._until_the_end()
        wall_s = time.monotonic() - self._started
        if stopped in ("timeout", "memory"):  # not of too many processes: each would be one more before it is killed
            self._note_what_runs(stopped)
        self._take(kill_descendants())
        left = tuple(children(os.getpid()))
        self._drain()
        return SupervisorReport(
            stopped=stopped,
            status=self._status,
            result=self._whole_result(),
            peak_bytes=self._peak,
            wall_s=wall_s,
            num_processes=self._num_processes,
            left=left,
        )

    def _until_the_end(self) -> Stop | None:
        """Read what the child writes, and look at its bounds every POLL_S seconds; the bound that was passed, or None."""
        poller = select.poll()
        pipes = {self._output, self._result_pipe}
        for handle in pipes:
            poller.register(handle, select.POLLIN)
        poller.register(self._worker.fileno(), select.POLLHUP)
        ended = _pidfd(self._child)
        if ended is not None:
            poller.register(ended, select.POLLIN)
        looked = 0.0
        while self._status is None and self._whole_result() is None:
            for handle, _ in poller.poll(POLL_S * 1000):
                if handle == self._worker.fileno():
                    return "worker"
                if handle in pipes and (stopped := self._read(handle)) is not None:
                    return stopped
                if handle in pipes and handle not in self._open:
                    poller.unregister(handle)
            self._take(reap())
            if time.monotonic() - looked >= POLL_S:
                looked = time.monotonic()
                if (passed := self._passed(looked)) is not None:
                    return passed
        return None

    def _passed(self, now: float) -> Stop | None:
        """The bound that is passed now."""
        pids = descendants(os.getpid())
        self._peak = max(self._peak, tree_bytes(self._child, pids))
        self._num_processes = len(pids)
        if self._peak > self._bounds.memory_bytes:
            return "memory"
        if self._num_processes > MAX_PROCESSES:
            return "processes"
        if now - self._started > self._bounds.timeout_s:
            return "timeout"
        return "disk" if _fills_the_disk(self._folder) else None

    def _read(self, handle: int) -> Stop | None:
        """Take in what is in a pipe; the bound that this passes."""
        try:
            data = os.read(handle, _CHUNK)
        except BlockingIOError:
            return None
        if not data:
            self._open.discard(handle)
            return None
        if handle == self._result_pipe:
            self._result += data
            return "result" if len(self._result) > RESULT_LIMIT_BYTES else None
        try:
            _write(self._log, data[: max(0, LOG_LIMIT_BYTES - self._logged)])
        except OSError:
            return "disk"
        self._logged += len(data)
        return "output" if self._logged > LOG_LIMIT_BYTES else None

    def _drain(self) -> None:
        """Take in what the dead have left in their pipes."""
        for handle in tuple(self._open):
            while handle in self._open:
                before = (self._logged, len(self._result))
                if self._read(handle) is not None or (handle in self._open and before == (self._logged, len(self._result))):
                    break

    def _whole_result(self) -> bytes | None:
        """The result, once all of it is there: 8 bytes that tell its length come first."""
        if len(self._result) < 8:
            return None
        length = int.from_bytes(self._result[:8], "big")
        return bytes(self._result[8 : 8 + length]) if len(self._result) >= 8 + length else None

    def _take(self, ended: dict[int, int]) -> None:
        if self._child in ended:
            self._status = ended[self._child]

    def _note_what_runs(self, stopped: Stop) -> None:
        """Write into the log what was running, and for a timeout where the child's Python was."""
        if stopped == "timeout":
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGUSR2)  # faulthandler prints the traceback, see child.py
            until = time.monotonic() + TRACE_WAIT_S
            while (left := until - time.monotonic()) > 0:
                if select.select([self._output], [], [], left)[0] and (self._read(self._output) or self._output not in self._open):
                    break
        started = [pid for pid in descendants(os.getpid()) if pid != self._child]
        several = f" and {len(started) - 3} more" if len(started) > 3 else ""
        commands = "; ".join(command_of(pid)[:200] for pid in started[:3])
        what = f"{commands}{several}" if started else "no process but the item's own"
        with contextlib.suppress(OSError):
            _write(self._log, f"\ncoldpress: stopped ({stopped}); still running: {what}\n".encode())


def _fills_the_disk(folder: Path) -> bool:
    """Whether next to nothing is left on the disk of a folder that itself holds more than that."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False  # the child removed it
    least = min(FREE_BYTES, disk.f_blocks * disk.f_frsize // 50)
    return disk.f_bavail * disk.f_frsize < least and _holds_more(folder, least)


def _holds_more(folder: Path, num_bytes: int) -> bool:
    held = 0
    for above, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                held += os.lstat(f"{above}/{name}").st_blocks * 512
        if held > num_bytes:
            return True
    return False


def _pidfd(pid: int) -> int | None:
    """A handle that is readable when the process ends; None before Linux 5.3, where POLL_S is waited at most."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _write(handle: int, data: bytes) -> None:
    while rest := data:
        data = rest[retried(lambda: os.write(handle, rest)) :]
