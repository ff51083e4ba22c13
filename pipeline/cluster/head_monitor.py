"""Monitor of a cluster's head: whether it answers. Imports no ray.

Ray kills a driver whose head has been silent for a minute, without a message; a call that waits for
the head never returns. So a thread checks the head, the driver calls Ray only while the head
answers, and ends the campaign properly if it stays silent. If the driver is blocked in a call of
Ray, the thread ends it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from freezer.errors import FAILED, INFRASTRUCTURE, InfrastructureError
from pipeline.workspace import die_with

SILENCE_S = 30.0
"""Time that a head may be silent, enough to restart one that stores its state in an external Redis.
"""

ORDER_S = 20.0
"""Time for the driver to end after that, before the thread ends it.

Ray kills it after a minute of silence.
"""

CHECK_INTERVAL_S = 1.0
"""Interval of checks."""

CONNECT_S = 5.0
"""Time limit of a response."""


def host_and_port(address: str) -> tuple[str, int] | None:
    """Parse `HOST:PORT`, with or without a scheme; None for an address without a port."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    is_port = port.isdecimal() and 0 < int(port) < 2**16
    return (host.strip("[]"), int(port)) if host and is_port else None


def end_driver(error: InfrastructureError) -> NoReturn:
    """Exit the process without cleanup; finished work is in the ledger."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        print(
            error.coded,
            file=sys.stderr,
            flush=True,
        )
    os._exit(INFRASTRUCTURE)


class Head:
    """The head at an address.

    Args:
        address: address as of `host_and_port`.
        end: called by the thread if the driver has not ended in time.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        address: str,
        *,
        end: Callable[[InfrastructureError], object] = end_driver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self._end = end
        self._clock = clock
        self._silent_since: float | None = None

    @property
    def is_silent(self) -> bool:
        """Whether the last check failed."""
        return self._silent_since is not None

    def answers(self) -> bool:
        """Whether the last check succeeded.

        Raises:
            InfrastructureError: the head has been silent for SILENCE_S.
        """
        if self._silent_s() > SILENCE_S:
            raise self._lost()
        return not self.is_silent

    def check(self) -> None:
        """Check the head; end the driver if the head has been silent for SILENCE_S + ORDER_S."""
        place = host_and_port(self.address)
        if place is None:
            return
        try:
            socket.create_connection(place, timeout=CONNECT_S).close()
            self._silent_since = None
        except OSError:
            if self._silent_since is None:
                self._silent_since = self._clock()
        if self._silent_s() > SILENCE_S + ORDER_S:
            self._end(self._lost())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Check the head in a thread."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(CHECK_INTERVAL_S):
                self.check()

        threading.Thread(
            target=watch,
            name="head",
            daemon=True,
        ).start()
        try:
            yield
        finally:
            ended.set()

    def _silent_s(self) -> float:
        since = self._silent_since
        return 0.0 if since is None else self._clock() - since

    def _lost(self) -> InfrastructureError:
        return InfrastructureError(
            f"the head of the Ray cluster at {self.address} has not answered for"
            f" {self._silent_s():.0f} s; finished work is kept: start the cluster, then run the"
            " same command again",
            code="CP-RAY",
        )


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
    passed = (signal.SIGINT, signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, passed)  # or a hook of fork drops one
    child = os.fork()
    if child:
        for number in passed:
            signal.signal(number, lambda received, _: os.kill(child, received))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if child == 0:
        _end_after(drive, parent)
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        time.sleep(0.1)  # a signal just before an endless wait would be answered at its end
    status = os.waitstatus_to_exitcode(ended[1])
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
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        code = code or 0
        os._exit(code if isinstance(code, int) and code != FAILED else REPORTED)
