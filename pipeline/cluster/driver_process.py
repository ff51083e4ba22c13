"""The process of a driver that joins a cluster.

If Ray dies while a driver connects, Ray's C++ code ends the process at once, with exit code 1 and
without an exception. So the driver is a child of the command, which reports such an end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from freezer.errors import FAILED, InfrastructureError
from pipeline.workspace import die_with

REPORTED = 101
"""Exit code of a child in place of FAILED, with which Ray's C++ code ends one."""


def in_child(drive: Callable[[], object]) -> int:
    """Run a driver in a child process, pass signals on to it, and return its exit code.

    Args:
        drive: returns an exit code, or None for 0.

    Raises:
        InfrastructureError: the child was ended.
    """
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _end_after(drive, parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: os.kill(child, received))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == REPORTED:
        return FAILED
    if status != FAILED and status >= 0:
        return status
    raise InfrastructureError(
        f"the driver was ended (status {status}), most likely because Ray died; finished work is"
        " kept: start the cluster, then run the same command again",
        code="CP-RAY",
    )


def _end_after(drive: Callable[[], object], parent: int) -> NoReturn:
    """In the child: run the driver, and exit without Python's cleanup, in which Ray may end it."""
    code: Any = REPORTED
    try:
        die_with(parent)
        os.setpgid(0, 0)  # a signal to the command's group reaches it once
        code = drive()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        code = code or 0
        os._exit(code if isinstance(code, int) and code != FAILED else REPORTED)
