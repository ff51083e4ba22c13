"""Run a function in a child process with limits, so that a crash, a hang or an exception is one typed result.

The child is forked from a forkserver that has imported torch, which takes half a second instead of several. The forkserver
inherits the environment of this process, so the instruction-set limits of a device class hold in every child. A supervisor
process between the two (supervisor.py) watches the limits and ends everything that the child started.

A worker ends by SIGKILL or os._exit, which clean nothing up. So the socket of its forkserver loses its name as soon as it exists:
the worker reaches it by a handle, and no file is left behind.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from freezer.errors import ColdpressError, InfrastructureError
from freezer.files.atomic import make_folder
from freezer.freezing.diagnostics.remedies import NOT_WRITTEN, ROOM
from pipeline.failures.classify import CODES, GPU_MEMORY, NODE_MEMORY, classify
from pipeline.records.outcome import Failure
from pipeline.worker.child import End
from pipeline.worker.supervisor import LOG_LIMIT_BYTES, MAX_PROCESSES, RESULT_LIMIT_BYTES, Bounds, SupervisorReport, supervise
from pipeline.workspace.processes import KILL_WAIT_S, adopting, children, descendants, kill

PRELOAD = [
    "torch",
    "torch._inductor.compile_fx",
    "freezer.freezing.candidates.build",
    "freezer.freezing.validation.judge",
    "freezer.freezing.packaging.assemble",
    "pipeline.worker.supervisor",
]
START_LIMIT_S = 300.0
"""Limit for the start of a child. The first one of a worker waits until its forkserver has imported torch: seconds, or a minute
from a cold disk. That time does not count against the limits of the item."""
GRACE_S = 60.0
"""Time beyond an item's limit after which a silent supervisor counts as dead."""
LOG_TAIL_LINES = 20
_TAIL_BYTES = 20_000
_LINE_CHARACTERS = 400
_TRACE = "(most recent call first):"
"""First words of a traceback by faulthandler."""
_HANDLES = "/proc/self/fd/"
_UNKNOWN_STATUS = 255
"""Exit code that multiprocessing reports if the forkserver of a process died first."""
VMSTAT = Path("/proc/vmstat")
SPARE_BYTES, SPARE_BYTES_PER_CPU = 2_000_000_000, 16_000_000
"""Private memory that a process may map beyond its limit of resident memory: stacks of threads, arenas, untouched pages."""

_starting = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory that an item may use.

    Attributes:
        limit_bytes: resident memory of the child and its own children.
        asked: whether the entry sets it; otherwise it is a share of this machine.
        bounds_requests: whether to limit mapped memory too. Not for CUDA, whose processes map more than the machine has.
    """

    limit_bytes: int
    asked: bool = True
    bounds_requests: bool = True

    @property
    def data_bytes(self) -> int | None:
        """See supervisor.Bounds."""
        spare = SPARE_BYTES + SPARE_BYTES_PER_CPU * (os.cpu_count() or 1)
        return self.limit_bytes + spare if self.bounds_requests else None


def run_isolated(
    function: Callable[..., Any], args: tuple[Any, ...], *, folder: Path, log: Path, timeout_s: float, memory: Memory
) -> End:
    """Run a function in a child process. Nothing that the child starts survives this call.

    Args:
        function: importable by name, not from the main module; its result must pickle.
        args: arguments that pickle.
        folder: for the child's temporary files.
        log: file for the child's output.
        timeout_s: wall time from the start of the child.
        memory: memory that it may use.

    Raises:
        InfrastructureError: no child could be started.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    make_folder(log.parent)
    bounds = Bounds(timeout_s=timeout_s, memory_bytes=memory.limit_bytes, data_bytes=memory.data_bytes)
    own, supervisors = context.Pipe()
    payload = pickle.dumps((function, args))
    process = context.Process(target=supervise, args=(payload, str(folder), str(log), bounds, supervisors), daemon=False)
    oom_kills = _oom_kills()
    before: set[int] = set()
    kept: SupervisorReport | None = None
    with adopting():
        try:
            _start(process)
            supervisors.close()
            _expect_start(own)
            before = set(children(os.getpid()))
            kept = _hear(own, timeout_s + GRACE_S)
        finally:
            supervisors.close()
            own.close()  # a supervisor that still runs ends everything now
            reaped = _end(process)
            if kept is None or kept.left or not reaped:
                _kill_adopted(before)
    end = _ended(kept, timeout_s=timeout_s, memory=memory, starved=_oom_kills() > oom_kills)
    if kept is not None:
        end = replace(end, peak_bytes=kept.peak_bytes, wall_s=kept.wall_s)
    failure = end.failure
    if failure is None:
        return end
    if failure.kind == "crash" and re.search(NOT_WRITTEN, _last_of(log)):
        failure = _stopped("disk", f"torch could not write a file, and {failure.message}; {ROOM}")
    return replace(end, failure=replace(failure, log_tail=log_tail(log)))


def _start(process: ForkServerProcess) -> None:
    """Start a supervisor from a thread: multiprocessing waits forever for a forkserver that hangs while it starts.

    Raises:
        InfrastructureError: it did not start within START_LIMIT_S, or its forkserver died.
    """
    failed: list[BaseException] = []
    given_up = threading.Event()

    def start() -> None:
        try:
            with _without_main():
                _start_forkserver()
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
            f"a child process did not start within {START_LIMIT_S:g} s: its forkserver hangs, most likely importing torch; check "
            "this node's disk and memory"
        )
    if failed:
        why = f"{type(failed[0]).__name__}: {failed[0]}"
        raise InfrastructureError(f"a child process could not be started ({why}); check this node's memory") from failed[0]


def _start_forkserver() -> None:
    """Start this process's forkserver, with a socket that has no name.

    multiprocessing would keep the socket and its folder until this process ends. Linux connects to a socket by a handle on its file
    (O_PATH), without a name. An abstract socket has no name either, but any user of the machine could connect to it.
    """
    server: Any = forkserver._forkserver
    settings: dict[str, Any] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    with _starting, _short_name_of_a_folder() as folder:
        own_folder = settings.get("tempdir")
        settings["tempdir"] = folder
        try:
            server.ensure_running()
        finally:
            settings["tempdir"] = own_folder
        if not server._forkserver_address.startswith(f"{folder}/"):
            return
        server._forkserver_address = f"{_HANDLES}{os.open(server._forkserver_address, os.O_PATH | os.O_CLOEXEC)}"


@contextlib.contextmanager
def _short_name_of_a_folder() -> Iterator[str]:
    """Yield a temporary folder as a handle: a socket's path has at most 108 characters, and TMPDIR may be long."""
    with tempfile.TemporaryDirectory(prefix="coldpress-fork-") as folder:
        handle = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"{_HANDLES}{handle}"
        finally:
            os.close(handle)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module: multiprocessing would run it again in each supervisor, and Ray's takes a second."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _expect_start(supervisor: Connection) -> None:
    """Wait until a supervisor has started.

    Raises:
        InfrastructureError: it sent nothing within START_LIMIT_S, or died.
    """
    if _hear(supervisor, START_LIMIT_S) is None:
        raise InfrastructureError(f"a child process died or did not start within {START_LIMIT_S:g} s; check this node's memory")


def _hear(supervisor: Connection, limit_s: float) -> Any:
    """Return the next message of a supervisor; None if it died or sent nothing in time."""
    with contextlib.suppress(EOFError, OSError):
        if supervisor.poll(limit_s):
            return supervisor.recv()
    return None


def _end(process: ForkServerProcess) -> bool:
    """Wait until a supervisor has ended. Kill one that does not, with everything below it.

    Returns:
        Whether its forkserver has reaped it; a forkserver that died leaves it to this process.
    """
    if process.pid is None:
        return True
    process.join(KILL_WAIT_S + 10)
    if process.exitcode is None:
        below = descendants(process.pid)
        kill([process.pid, *below])
        process.join(KILL_WAIT_S)
    status = process.exitcode
    if status is not None:
        process.close()
    return status not in (None, _UNKNOWN_STATUS)


def _kill_adopted(before: set[int]) -> None:
    """Kill the children that this process adopted from a dead supervisor."""
    deadline = time.monotonic() + KILL_WAIT_S
    while time.monotonic() < deadline:
        found = [pid for pid in children(os.getpid()) if pid not in before and _is_of_another_session(pid)]
        if not found:
            return
        kill(found)
        for pid in found:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def _is_of_another_session(pid: int) -> bool:
    try:
        return os.getsid(pid) != os.getsid(0)
    except ProcessLookupError:
        return False


def _ended(kept: SupervisorReport | None, *, timeout_s: float, memory: Memory, starved: bool) -> End:
    """Return the End of a child from its supervisor's report; `starved` if the kernel's OOM killer ran meanwhile."""
    if kept is None:
        how = "its supervisor was killed, by the kernel or by the model's own code"
        return End(failure=_starved(how, 0) if starved else _stopped("crash", how))
    if kept.stopped is not None:
        return End(failure=_passed(kept, timeout_s, memory))
    if kept.result is not None:
        end = _unpickled(kept.result)
        if end.failure is not None and end.failure.kind == "memory":
            return End(failure=_without_memory(end.failure, memory))
        if end.failure is not None and starved:
            return End(failure=_starved(f"the kernel killed one of its processes: {end.failure.message}", kept.peak_bytes))
        return end
    code = os.waitstatus_to_exitcode(kept.status) if kept.status is not None else None
    if code == -signal.SIGKILL and starved:
        return End(failure=_starved("the kernel killed it", kept.peak_bytes))
    how = f"died of {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with code {code}"
    return End(failure=_stopped("crash", f"the process {how} without a result; the end of its log may say why"))


def _passed(kept: SupervisorReport, timeout_s: float, memory: Memory) -> Failure:
    """Return the failure of a child that was stopped."""
    match kept.stopped:
        case "timeout":
            return _stopped("timeout", f"did not end within {timeout_s:g} s; raise limits.timeout_s")
        case "memory":
            return _over_memory(f"used more than {memory.limit_bytes / 1e9:.1f} GB", memory)
        case "output":
            most = LOG_LIMIT_BYTES / 1e6
            return _stopped("output", f"printed more than {most:.0f} MB; print less while the model loads and runs")
        case "processes":
            found = f"had {kept.num_processes} processes at a time, expected at most {MAX_PROCESSES}"
            return _stopped("processes", f"{found}; start fewer while the model loads and runs")
        case "supervisor":
            number, text = kept.error
            kind = "disk" if classify(OSError(number, text)).kind == "disk" else "infrastructure"
            return _stopped(kind, f"its supervisor failed ({text}); check this node's disk and processes")
        case "disk":
            return _stopped(
                "disk", "its temporary files filled the disk; make room, or let the model write less while it loads and runs"
            )
        case _:
            return _stopped("error", f"returned a result of more than {RESULT_LIMIT_BYTES / 1e6:.0f} MB")


def _without_memory(failure: Failure, memory: Memory) -> Failure:
    """Return the failure of a child whose request for memory was refused: beyond the machine's, or its limit plus spare."""
    if failure.code == GPU_MEMORY:
        return replace(
            failure, message=f"{failure.message}; end other processes on that GPU, or use a larger GPU or a smaller batch"
        )
    limit = f"requested more memory than its limit of {memory.limit_bytes / 1e9:.1f} GB plus spare ({failure.message})"
    return _over_memory(limit, memory)


def _over_memory(what: str, memory: Memory) -> Failure:
    remedy = "; raise limits.memory_gb" if memory.asked else ", the share of this machine for one item; use a larger worker"
    code = CODES["memory"] if memory.asked else NODE_MEMORY
    return Failure(kind="memory", code=code, message=what + remedy, tried_bytes=memory.limit_bytes)


def _starved(how: str, peak_bytes: int) -> Failure:
    """Return the failure of a child whose process the kernel's OOM killer took."""
    used = f"this machine ran out of memory when it used {peak_bytes / 1e9:.1f} GB ({how})"
    message = f"{used}; run less next to it, or use a larger worker"
    return Failure(kind="memory", code=NODE_MEMORY, message=message, tried_bytes=peak_bytes)


def _unpickled(result: bytes) -> End:
    """Return the End that a child sent. One that cannot be read is an error of its own."""
    try:
        end = pickle.loads(result)  # the child runs the item's code, which is trusted on this machine anyway
    except Exception as error:
        return End(failure=_stopped("error", f"its result cannot be read: {classify(error).message}"))
    return end if isinstance(end, End) else End(failure=_stopped("error", "returned something other than a result"))


def _stopped(kind: str, message: str) -> Failure:
    return Failure(kind=kind, code=CODES.get(kind, ColdpressError.code), message=message)


def _oom_kills() -> int:
    """Return how many processes the OOM killer has killed since the boot; 0 if the kernel does not count them."""
    with contextlib.suppress(OSError):
        found = re.search(r"^oom_kill (\d+)$", VMSTAT.read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def log_tail(log: Path) -> str:
    """Return the last lines of a log; of a long traceback at its end, the innermost calls."""
    lines = [line[:_LINE_CHARACTERS] for line in _last_of(log).splitlines()]
    traces = [number for number, line in enumerate(lines) if line.endswith(_TRACE)]
    if traces and len(lines) - traces[-1] > LOG_TAIL_LINES // 2:
        innermost = traces[-1] + LOG_TAIL_LINES // 2
        lines = [*lines[:innermost], *(line for line in lines[innermost:] if line.startswith("coldpress: "))]
    return "\n".join(lines[-LOG_TAIL_LINES:])


def _last_of(log: Path) -> str:
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")
    return ""
