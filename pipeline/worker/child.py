"""The child: where an item's code runs. It is set up so that nothing of it stays behind, and hands its result over by a pipe."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import resource
import signal
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pipeline.failures.classify import classify
from pipeline.records.failure import Failure
from pipeline.workspace.processes import die_with, oom_score

TEMPORARY = {
    "TMPDIR": "",
    "TEMP": "",
    "TMP": "",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "PYTORCH_KERNEL_CACHE_PATH": "kernels",
}
"""Where Python, the compilers and torch write beside what they are told to: by variable, the folder within the child's own.

A lock that a killed child leaves in a shared one would make the next child wait for ever (torch.utils.cpp_extension's does).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How a child ended.

    Attributes:
        value: what the function returned.
        failure: why there is no value; None if there is.
        peak_bytes: largest resident memory of the child and its own children.
        wall_s: duration from its start, in seconds.
    """

    value: Any = None
    failure: Failure | None = None
    peak_bytes: int = 0
    wall_s: float = 0.0


def run_child(payload: bytes, keeper: int, scratch: Path, output: int, result: int, data_bytes: int | None) -> NoReturn:
    """In the child: run the function, hand over its End, and leave.

    Args:
        payload: the pickled function and arguments.
        keeper: the process to die with.
        scratch: for temporary files.
        output: a pipe for all that is printed.
        result: a pipe for 8 bytes of length and the pickled End.
        data_bytes: see keeper.Bounds.
    """
    try:
        own = os.getpid()
        os.setsid()
        die_with(keeper)
        _redirect(output)
        _bound(data_bytes)
        _own_temporary(scratch)
        end = _run(payload)
        if os.getpid() == own:  # a fork of the user's comes by here too
            _hand_over(end, result)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)  # no atexit handlers, no destructors of the user's code, never back into the keeper's


def _redirect(output: int) -> None:
    """Send stdout and stderr of Python and of all else into the log, and have crashes and SIGUSR2 print a traceback there."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable(2, all_threads=False)
    faulthandler.register(signal.SIGUSR2, 2, all_threads=False)


def _bound(data_bytes: int | None) -> None:
    """Leave no core file, go first when memory runs out, and be refused memory beyond all measure at once.

    RLIMIT_DATA counts private writable mappings, touched or not: what malloc gives, and stacks of threads. RLIMIT_AS would count
    torch's libraries and mapped weights too. What is resident is for the keeper to watch; this is for what would be resident
    before it looks again.
    """
    oom_score(1000)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if data_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = data_bytes if hard == resource.RLIM_INFINITY else min(hard, data_bytes)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _own_temporary(scratch: Path) -> None:
    for name, folder in TEMPORARY.items():
        os.environ[name] = str(scratch / folder)
    tempfile.tempdir = None  # else what it found before the fork


def _run(payload: bytes) -> End:
    try:
        function, args = pickle.loads(payload)  # of this Coldpress's own worker
        return End(value=function(*args))
    except BaseException as error:  # whatever the user's code raises is this item's failure
        _print_traceback()
        return End(failure=classify(error))


def _print_traceback() -> None:
    with contextlib.suppress(Exception):  # the user's code may have closed stderr, or made its own
        traceback.print_exc()


def _hand_over(end: End, result: int) -> None:
    """Send an End; one that cannot be sent is an error of its own."""
    try:
        data = pickle.dumps(end)
    except BaseException as error:  # of whatever the user's code has put in
        _print_traceback()
        found = classify(error)
        why = f"its result cannot be pickled: {found.message}"
        data = pickle.dumps(End(failure=Failure(kind="error", code=found.code, message=why)))
    with os.fdopen(result, "wb") as pipe:
        pipe.write(len(data).to_bytes(8, "big") + data)
