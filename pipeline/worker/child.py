"""The child process that runs an item's code.

It leaves nothing behind, and writes its result to a file of the supervisor.
"""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Generator, Iterator
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from typing import Any, NoReturn

from freezer.codec import frozen
from freezer.freezing import in_hand
from pipeline.failures import classify
from pipeline.records import Failure
from pipeline.workspace import alone, die_with, oom_score

TEMPORARY = {
    "TMPDIR": "",
    "TEMP": "",
    "TMP": "",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "PYTORCH_KERNEL_CACHE_PATH": "kernels",
}
"""Folders for temporary files and caches, by environment variable, relative to the child's own
folder.

In a shared folder, a lock that a killed child leaves would block the next child forever
(torch.utils.cpp_extension has one). """


@frozen
class End:
    """How a child ended.

    Attributes:
        value: what the function returned.
        parts: what it yielded, if it is a generator function; also if it failed later.
        failure: why there is no value; None if there is.
        in_hand: what it had in hand at its end (freezer/freezing/in_hand.py).
        peak_bytes: largest resident memory of the child and its own children.
        wall_s: duration from its start, in seconds.
    """

    value: Any = None
    parts: tuple[Any, ...] = ()
    failure: Failure | None = None
    in_hand: str = ""
    peak_bytes: int = 0
    wall_s: float = 0.0


def run_child(
    payload: bytes,
    supervisor: int,
    scratch: Path,
    output: int,
    result: int,
    data_bytes: int | None,
    memory: mmap,
) -> NoReturn:
    """In the child: run the function, send each part that it yields and its End, and exit.

    Args:
        payload: pickled function and arguments.
        supervisor: process to die with.
        scratch: folder for temporary files.
        output: file for stdout and stderr.
        result: file for the pickled parts and End, one after the other.
        data_bytes: see supervisor.Bounds.
        memory: for what it has in hand.
    """
    from freezer.timing import brief_waits, share_machine  # with torch, as the forkserver has

    try:
        child = os.getpid()
        os.setsid()
        die_with(supervisor)
        _redirect(output)
        _bound(data_bytes)
        in_hand.memory = memory
        share_machine(by=alone)
        for name, folder in TEMPORARY.items():
            os.environ[name] = str(scratch / folder)
        tempfile.tempdir = None  # it was cached before the fork
        with brief_waits():
            for message in _messages(payload):
                if os.getpid() == child:  # not in a fork by the user's code
                    os.write(result, pickle.dumps(message))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)  # no atexit handlers, no destructors of the user's code


def _redirect(output: int) -> None:
    """Redirect stdout and stderr to the log, and print a traceback there on a crash or SIGUSR2."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable(2, all_threads=False)
    faulthandler.register(signal.SIGUSR2, 2, all_threads=False)


def _bound(data_bytes: int | None) -> None:
    """Write no core file, be the OOM killer's first choice, and limit private memory.

    RLIMIT_DATA counts private writable mappings: malloc and stacks of threads. RLIMIT_AS would also
    count torch's libraries and mapped weights. The supervisor watches resident memory; this limit
    stops what would be resident before it looks again.
    """
    oom_score(1000)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if data_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = data_bytes if hard == resource.RLIM_INFINITY else min(hard, data_bytes)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _messages(payload: bytes) -> Iterator[object]:
    """Yield the parts that a function yields, and its End."""
    try:
        function, args = pickle.loads(payload)  # from this Coldpress's own worker
        value = function(*args)
        if isinstance(value, Generator):
            yield from value
            value = None
        yield End(value=value)
    except BaseException as error:  # any exception of the user's code is this item's failure
        with suppress(Exception):  # the user's code may have closed or replaced stderr
            traceback.print_exc()
        yield End(failure=classify(error))


def received(data: bytes) -> tuple[tuple[Any, ...], End | None]:
    """Return the parts that a child sent, and its End; None if it died before."""
    parts = list[Any]()
    file = io.BytesIO(data)
    with suppress(EOFError, pickle.UnpicklingError):  # it died while it wrote
        while True:
            message = pickle.load(
                file
            )  # the child runs the item's code, which is trusted on this machine anyway
            if isinstance(message, End):
                return tuple(parts), message
            parts.append(message)
    return tuple(parts), None
