"""Turns: campaigns on one cluster agree on the nodes they judge on.

A judge asks Ray for all cores of a node, but Ray keeps no cores free for it: while small tasks
arrive, it would wait forever. So a campaign claims a node on a board that all campaigns of the
cluster read, and the others start no builds there.

The board is the key-value table of the cluster's head, through Ray's internal API. A named detached
actor is worse: it occupies a worker process on some node, dies with that node, and stays on the
cluster forever. A driver that stops writing is ignored after a while by each reader's own clock.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import ray
from ray.experimental import internal_kv

from pipeline.cluster.head_monitor import Head

NAMESPACE = "coldpress"
BOARD = "campaigns/"

READ_S = 1.0
"""Interval of reading the board."""

HEARTBEAT_S = 5.0
"""Interval of writing a heartbeat."""

SILENCE_S = 30.0
"""Time without a change after which a driver is considered dead.

It writes nothing while it publishes a model.
"""

REST_S = 3 * READ_S
"""Time that a campaign leaves a node to the others after a turn: long enough to read the board and
start builds.
"""


class Board(Protocol):
    """A table shared by all drivers of a cluster."""

    def read(self) -> Mapping[str, str]:
        """Return all rows."""

    def write(self, key: str, value: str) -> None:
        """Set a row."""

    def erase(self, key: str) -> None:
        """Remove a row if it exists."""


class Turns:
    """Claims of this campaign and of the others.

    Args:
        board: board of the cluster; None for a local cluster.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, board: Board | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._board = board
        self._clock = clock
        self._key = uuid.uuid4().hex
        self._claims: set[str] = set()
        self._num_heartbeats = 0
        self._next = self._next_heartbeat = clock()
        self._seen: dict[str, tuple[str, float]] = {}

    @property
    def others(self) -> bool:
        """Whether other campaigns are running on the cluster."""
        return bool(self._seen)

    def claim(self, node_id: str) -> None:
        """Claim a node: the other campaigns start no more work there."""
        self._claims.add(node_id)
        self._write_heartbeat()

    def release(self, node_id: str) -> None:
        """Release a node."""
        self._claims.discard(node_id)
        self._write_heartbeat()

    def claimed(self, node_id: str) -> bool:
        """Whether another campaign has claimed a node."""
        return any(node_id in json.loads(text)["claims"] for text, _ in self._seen.values())

    def tick(self) -> None:
        """Write a heartbeat and read the board, if they are due."""
        if self._board is None or self._clock() < self._next:
            return
        if self._clock() >= self._next_heartbeat:
            self._write_heartbeat()
        rows = self._board.read()
        now = self._clock()
        self._next = now + READ_S
        seen: dict[str, tuple[str, float]] = {}
        for key in rows.keys() - {self._key}:
            before, since = self._seen.get(key, ("", now))
            if before != rows[key]:
                since = now
            if now - since <= SILENCE_S:
                seen[key] = (rows[key], since)
            else:
                self._board.erase(key)
        self._seen = seen

    def close(self) -> None:
        """Remove this campaign from the board."""
        if self._board is not None:
            self._board.erase(self._key)

    def _write_heartbeat(self) -> None:
        if self._board is None:
            return
        self._num_heartbeats += 1
        self._next_heartbeat = self._clock() + HEARTBEAT_S
        self._board.write(
            self._key,
            json.dumps({"heartbeat": self._num_heartbeats, "claims": sorted(self._claims)}),
        )


class ClusterBoard:
    """The board in the key-value table of a cluster's head; empty while the head does not
    answer.
    """

    def __init__(self, head: Head) -> None:
        self._head = head

    def read(self) -> Mapping[str, str]:
        """Return all rows.

        Raises:
            InfrastructureError: the head stays silent.
        """
        rows: dict[str, str] = {}
        with reported_by(self._head) as answers:
            for key in internal_kv._internal_kv_list(BOARD, namespace=NAMESPACE) if answers else ():
                value = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
                if value is not None:
                    rows[key.decode().removeprefix(BOARD)] = value.decode()
        return rows

    def write(self, key: str, value: str) -> None:
        """Set a row."""
        with reported_by(self._head) as answers:
            if answers:
                internal_kv._internal_kv_put(
                    f"{BOARD}{key}",
                    value,
                    overwrite=True,
                    namespace=NAMESPACE,
                )

    def erase(self, key: str) -> None:
        """Remove a row if it exists."""
        if not self._head.is_silent:
            with contextlib.suppress(RuntimeError, OSError, ray.exceptions.RayError):
                internal_kv._internal_kv_del(f"{BOARD}{key}", namespace=NAMESPACE)


@contextlib.contextmanager
def reported_by(head: Head) -> Iterator[bool]:
    """Yield whether the head answers; ignore errors of Ray."""
    answers = head.answers()
    with contextlib.suppress(RuntimeError, OSError, ray.exceptions.RayError):
        yield answers
