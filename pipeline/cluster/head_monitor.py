"""The head of a cluster, as a driver sees it: whether it answers. Imports no ray.

Ray ends a driver whose head has been silent for a minute, with an exit code of its own and no word of the campaign's; a call that
waits for the head never comes back. So a thread looks whether the head answers, the driver asks nothing of a silent one, and ends
the campaign in order when it stays silent. A driver that was within a call of Ray's when the head died is ended by the thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from freezer.errors import InfrastructureError
from pipeline.exit_codes import INFRASTRUCTURE

SILENCE_S = 30.0
"""How long a head may be silent: one with its state elsewhere (an external Redis) is started again by then."""

ORDER_S = 20.0
"""How long it may then take to end in order, until the thread ends the driver; Ray would do so after a minute of silence."""

LOOK_S = 1.0
"""Between two looks."""

CONNECT_S = 5.0
"""How long an answer may take."""


def host_and_port(address: str) -> tuple[str, int] | None:
    """What an address of Ray's names, `HOST:PORT` with or without a scheme; None of one without a port."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdigit() else None


def check_answers(address: str) -> None:
    """Return if something listens at an address; one without a port is not looked at.

    Args:
        address: as of `host_and_port`.

    Raises:
        OSError: nothing answers there.
    """
    place = host_and_port(address)
    if place is not None:
        with socket.create_connection(place, timeout=CONNECT_S):
            pass


def end_driver(error: InfrastructureError) -> NoReturn:
    """End this process, as one that is killed; what it had finished is in the ledger."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        print(error.coded, file=sys.stderr, flush=True)
    os._exit(INFRASTRUCTURE)


class Head:
    """The head at an address.

    Args:
        address: as of `host_and_port`.
        end: what the thread does when the driver has not ended in order.
        clock: in seconds; never goes back.
    """

    def __init__(
        self,
        address: str,
        *,
        end: Callable[[InfrastructureError], object] = end_driver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self._end, self._clock = end, clock
        self._silent_since: float | None = None

    @property
    def is_silent(self) -> bool:
        """Whether it did not answer when it was last looked at."""
        return self._silent_since is not None

    def answers(self) -> bool:
        """Whether it answered when it was last looked at.

        Raises:
            InfrastructureError: it has been silent for SILENCE_S.
        """
        if self._silent_s() > SILENCE_S:
            raise self._lost()
        return not self.is_silent

    def look(self) -> None:
        """See whether it answers; end the driver where it has not for much too long."""
        try:
            check_answers(self.address)
            self._silent_since = None
        except OSError:
            if self._silent_since is None:
                self._silent_since = self._clock()
        if self._silent_s() > SILENCE_S + ORDER_S:
            self._end(self._lost())

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Have a thread look at it."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(LOOK_S):
                self.look()

        thread = threading.Thread(target=watch, name="head", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()

    def _silent_s(self) -> float:
        since = self._silent_since
        return 0.0 if since is None else self._clock() - since

    def _lost(self) -> InfrastructureError:
        return InfrastructureError(
            f"the head of the Ray cluster at {self.address} has not answered for {self._silent_s():.0f} s; what was finished is "
            "kept: start the cluster, then the same command again",
            code="CP-RAY",
        )
