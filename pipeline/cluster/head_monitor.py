"""Monitor of a cluster's head: whether it answers. Imports no ray.

Ray kills a driver whose head has been silent for a minute, without a message; a call that waits for
the head never returns. So a thread checks the head, the driver calls Ray only while the head
answers, and ends the campaign properly if it stays silent.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

from freezer.errors import InfrastructureError

SILENCE_S = 30.0
"""Time that a head may be silent, enough to restart one that stores its state in an external Redis.
"""

CHECK_INTERVAL_S = 1.0
"""Interval of checks."""

CONNECT_S = 5.0
"""Time limit of a response."""


def host_and_port(address: str) -> tuple[str, int] | None:
    """Parse `HOST:PORT`, with or without a scheme; None for an address without a port."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdigit() else None


class Head:
    """The head at an address.

    Args:
        address: address as of `host_and_port`.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        address: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
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
        since = self._silent_since
        if since is not None and self._clock() - since > SILENCE_S:
            raise InfrastructureError(
                f"the head of the Ray cluster at {self.address} has not answered for"
                f" {self._clock() - since:.0f} s; finished work is kept: start the cluster, then"
                " run the same command again",
                code="CP-RAY",
            )
        return since is None

    def check(self) -> None:
        """Check the head."""
        place = host_and_port(self.address)
        if place is None:
            return
        try:
            socket.create_connection(place, timeout=CONNECT_S).close()
            self._silent_since = None
        except OSError:
            if self._silent_since is None:
                self._silent_since = self._clock()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Check the head in a thread."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(CHECK_INTERVAL_S):
                self.check()

        threading.Thread(target=watch, name="head", daemon=True).start()
        try:
            yield
        finally:
            ended.set()
