"""The process of a driver. If Ray dies while it is called, its C++ code ends the process at once,
with exit code 1 and no exception. So another process waits for the driver, and reports that.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

from freezer.errors import FAILED, InfrastructureError
from pipeline.workspace import die_with


def continue_in_child() -> None:
    """Fork, and return in the child; this process waits for it, and exits with its code.

    Raises:
        InfrastructureError: Ray has ended the child.
    """
    parent, (ours, theirs) = os.getpid(), os.pipe()
    child = os.fork()
    if child == 0:
        die_with(parent)
        os.setpgid(0, 0)  # a signal reaches it once, also one to the group
        atexit.register(os.write, theirs, b".")
        return
    os.close(theirs)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: os.kill(child, received))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == FAILED and not os.read(ours, 1):
        raise InfrastructureError(
            "Ray died, and ended this driver; finished work is kept: start the cluster, then run"
            " the same command again",
            code="CP-RAY",
        )
    sys.exit(code if code >= 0 else 128 - code)
