"""The supervisor of one item: a process between a worker and the child. It watches limits, and ends
with both.

    worker -> forkserver -> supervisor -> child -> compilers, and anything else the model starts

The supervisor holds the child's result in a file without a name in memory (memfd), and adopts every
orphan of the child. It ends all processes when the child has ended, has passed a limit, or when the
worker is gone (also by kill -9). It runs none of the item's code.
"""

from __future__ import annotations

import importlib
import mmap
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, NoReturn

from freezer.codec import frozen
from freezer.files import make_folder, retried
from freezer.freezing.in_hand import PAUSES, SIZE, TIME
from pipeline.failures import classify, coded_failure
from pipeline.records import Failure
from pipeline.worker.child import run_child
from pipeline.workspace import (
    COMPUTES,
    WAITS,
    MachineShare,
    become_subreaper,
    children,
    descendants,
    kill,
    kill_descendants,
    oom_score,
    reap,
    remove_tree,
    signal_all,
    tree_bytes,
)

POLL_S = 0.1
LOG_LIMIT_BYTES = 64 * 1024 * 1024
MAX_PROCESSES = 100
"""Limit of processes of one item at a time. A build runs a handful of compilers."""
SPARE_BYTES = 2_000_000_000
SPARE_BYTES_PER_CPU = 24_000_000
"""Private memory that a process may map beyond its limit of resident memory: stacks of threads,
arenas, untouched pages.
"""
HANG_SHARE = 0.5
"""Share of the time limit for one activity with one candidate: if it hangs, the others get the
whole time in another child.
"""
TRACE_WAIT_S = 0.3
"""Time for a child that timed out to print its traceback."""

Stop = Literal["timeout", "memory", "output", "processes", "worker"]


@frozen
class Bounds:
    """Limits of a child.

    Attributes:
        timeout_s: wall time of each part that the child sends, and of what follows the last.
        memory_bytes: resident memory of the child and everything it starts.
        asked: whether the entry sets that; otherwise it is a share of this machine.
        bounds_requests: whether to limit mapped memory too. Not for CUDA, whose processes map more
            than the machine has.
    """

    timeout_s: float
    memory_bytes: int
    asked: bool = True
    bounds_requests: bool = True

    @property
    def data_bytes(self) -> int | None:
        """Private memory that one process may map; None for any."""
        spare = SPARE_BYTES + SPARE_BYTES_PER_CPU * (os.cpu_count() or 1)
        return self.memory_bytes + spare if self.bounds_requests else None


@frozen
class SupervisorReport:
    """Report of a supervisor to its worker.

    Attributes:
        stopped: limit that was passed; None if the child ended by itself.
        status: wait status of the child; None if it could not be reaped.
        result: bytes that the child sent, see `child.received`.
        in_hand: see End.
        wall_s: time of the child, without that when it paused.
        error: failure of the supervisor itself.
    """

    stopped: Stop | None = None
    status: int | None = None
    result: bytes = b""
    in_hand: str = ""
    peak_bytes: int = 0
    wall_s: float = 0.0
    error: Failure | None = None


def forkserver(handle: int, preload: Sequence[str]) -> NoReturn:
    """In the forkserver: import modules, then fork a supervisor for each connection that a socket
    receives, until it is closed. A message with it may name a further module to import. It adopts
    what a killed supervisor leaves, also stopped processes, and ends that with itself.
    """
    become_subreaper()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps supervisors
    for name in preload:
        importlib.import_module(name)
    requests = socket.socket(fileno=handle)
    supervisors = set[int]()
    while True:
        message, handles, _, _ = socket.recv_fds(requests, 256, 1)
        if not message:  # the worker is gone
            while left := children(os.getpid()):
                kill(set(left) - supervisors)  # which end by themselves
                time.sleep(POLL_S)
            os._exit(0)
        if name := message.decode().strip():
            with suppress(Exception):  # the child reports why it cannot be imported
                importlib.import_module(name)
        pid = os.fork()
        supervisors = {pid, *supervisors.intersection(children(os.getpid()))}
        if pid == 0:
            try:
                requests.close()
                with suppress(OSError, EOFError):  # the worker is gone
                    supervise(Connection(handles[0]))
            finally:
                os._exit(0)
        os.close(handles[0])


def supervise(worker: Connection) -> None:
    """In the supervisor: run the child to its end, and report to the worker."""
    os.setsid()
    become_subreaper()
    oom_score(0)  # the OOM killer takes the child and its compilers first
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    worker.send(os.getpid())
    payload, log, bounds = worker.recv()
    try:
        with retried(lambda: open(log, "ab", buffering=0)) as file, _scratch(log.parent) as scratch:
            report = _ChildWatch(file, bounds, worker).run(payload, scratch)
    except (
        OSError,
        subprocess.SubprocessError,
    ) as error:  # a full disk, or no free process: not a fault of the item
        kill_descendants()
        kind = "disk" if classify(error).kind == "disk" else "infrastructure"
        message = f"its supervisor failed ({error}); check this node's disk and processes"
        report = SupervisorReport(error=coded_failure(kind, message))
    worker.send(report)


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Make the child's folder for temporary files, and yield it by a handle of this process.

    Staging folders have names of over 100 characters, and the path of a socket, as multiprocessing
    makes them, has at most 108.
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

    def __init__(
        self,
        log: FileIO,
        bounds: Bounds,
        worker: Connection,
    ) -> None:
        self._log = log
        self._bounds = bounds
        self._worker = worker
        self._result = os.memfd_create("result")
        self._in_hand = mmap.mmap(-1, SIZE)
        self._share = MachineShare()
        self._seen = b""
        self._peak = self._sent = 0
        self._paused_s, self._is_paused = 0.0, False
        self._status: int | None = None

    def run(self, payload: bytes, scratch: Path) -> SupervisorReport:
        """Run the child to its end, then end everything below this process."""
        supervisor = os.getpid()
        while not self._share.take():
            if self._worker.poll(POLL_S):  # it sends no more: it is gone
                return SupervisorReport(stopped="worker")
        self._child = os.fork()
        if self._child == 0:
            os.close(self._worker.fileno())
            run_child(
                payload,
                supervisor,
                scratch,
                self._log.fileno(),
                self._result,
                self._bounds.data_bytes,
                self._in_hand,
            )
        started = self._since = time.monotonic()
        stopped = self._until_the_end()
        wall_s = time.monotonic() - started - self._paused_s
        self._share.close()
        if stopped == "timeout":
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGUSR2)  # faulthandler prints it, see child.py
            time.sleep(TRACE_WAIT_S)
        self._take(kill_descendants())
        if self._is_too_long():
            stopped = stopped or "output"
            os.truncate(self._log.fileno(), LOG_LIMIT_BYTES)
        return SupervisorReport(
            stopped=stopped,
            status=self._status,
            result=os.pread(self._result, os.fstat(self._result).st_size, 0),
            in_hand=self._in_hand[:PAUSES].rstrip(b"\0").decode(errors="replace"),
            peak_bytes=self._peak,
            wall_s=wall_s,
        )

    def _until_the_end(self) -> Stop | None:
        """Wait for the child, and check its limits every POLL_S seconds; return the limit that was
        passed, or None.
        """
        poller = select.poll()
        poller.register(self._worker.fileno(), select.POLLHUP)
        poller.register(os.pidfd_open(self._child), select.POLLIN)
        while self._status is None:
            began = time.monotonic()
            if self._worker.fileno() in dict(poller.poll(POLL_S * 1000)):
                return "worker"
            self._take(reap())
            if self._status is None and self._gives_way():
                self._paused_s += time.monotonic() - began
            if self._status is None and (stopped := self._passed()) is not None:
                return stopped
        return None

    def _gives_way(self) -> bool:
        """Pause the child and all below it while the judge of another one measures; return whether
        it pauses, or waits to measure.
        """
        pauses = self._in_hand[TIME] == COMPUTES and not self._share.take()
        if pauses:
            if not self._is_paused:
                self._in_hand[PAUSES] = (self._in_hand[PAUSES] + 1) % 256
            self._is_paused = True
            signal_all(descendants(os.getpid()), signal.SIGSTOP)
        does = self._in_hand[TIME]  # again: what has the turn must not stay stopped
        if self._is_paused and (does != COMPUTES or not pauses):
            self._is_paused = False
            signal_all(descendants(os.getpid()), signal.SIGCONT)
        if pauses or does != COMPUTES:
            self._share.release()
        return self._is_paused or does == WAITS

    def _passed(self) -> Stop | None:
        """Return the limit that is passed now."""
        pids = descendants(os.getpid())
        self._peak = max(self._peak, tree_bytes(self._child, pids))
        if self._peak > self._bounds.memory_bytes:
            return "memory"
        if len(pids) > MAX_PROCESSES:
            return "processes"
        now = time.monotonic() - self._paused_s
        if (sent := os.fstat(self._result).st_size) > self._sent:
            self._sent = sent
            self._since = now
        limit_s = self._bounds.timeout_s
        if (seen := self._in_hand[:PAUSES]) != self._seen or not seen[0]:
            self._seen, self._taken = seen, now
        if now - self._since > limit_s or now - self._taken > HANG_SHARE * limit_s:
            return "timeout"
        return "output" if self._is_too_long() else None

    def _is_too_long(self) -> bool:
        return os.fstat(self._log.fileno()).st_size > LOG_LIMIT_BYTES

    def _take(self, ended: dict[int, int]) -> None:
        if self._child in ended:
            self._status = ended[self._child]
