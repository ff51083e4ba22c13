"""Turns: campaigns on one cluster agree on which nodes are about to be judged on. Imports no ray.

A judge asks Ray for all cores of a node, so nothing runs beside it, whoever started it. But Ray keeps no cores free for a task
that waits for all of them: on a node that small tasks keep coming to, it would wait for ever. So a campaign that wants to judge on
a node says so on a board that all campaigns of the cluster read, and the others start no builds there until it is done.

What is on the board is soft: a driver that stops beating is forgotten, by each reader's own clock, so that clocks may differ.
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

NAMESPACE, BOARD = "coldpress", "campaigns/"
"""Of what campaigns tell each other, in the cluster's key-value table."""


BEAT_S = 1.0
"""How often a driver reads what the others say."""

WORD_S = 5.0
"""How often it says that it lives, where what it claims stays the same."""

SILENCE_S = 30.0
"""After which a driver that has not said anything new is taken for dead. While it publishes one model it says nothing."""

REST_S = 3 * BEAT_S
"""How long a campaign leaves a node to the others after a turn: they have read the board by then, and started their builds."""


class Board(Protocol):
    """A small table that all drivers of a cluster share."""

    def read(self, *, besides: str) -> Mapping[str, str]:
        """All of it but one row."""

    def write(self, key: str, value: str) -> None:
        """Set one row."""

    def erase(self, key: str) -> None:
        """Remove one row; it need not be there."""


class Turns:
    """What this campaign claims, and what the others do.

    Args:
        board: of the cluster; None where this driver is alone on it.
        clock: in seconds; never goes back.
    """

    def __init__(self, board: Board | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._board, self._clock = board, clock
        self._key = uuid.uuid4().hex
        self._claims: set[str] = set()
        self._words = 0
        self._next = self._next_word = clock()
        self._seen: dict[str, tuple[str, float]] = {}

    @property
    def others(self) -> bool:
        """Whether other campaigns run on the cluster."""
        return bool(self._seen)

    def claim(self, node_id: str) -> None:
        """Ask the other campaigns to start nothing more on a node."""
        self._claims.add(node_id)
        self._say()

    def release(self, node_id: str) -> None:
        """Give a node back."""
        self._claims.discard(node_id)
        self._say()

    def claimed(self, node_id: str) -> bool:
        """Whether another campaign judges on a node, or is about to."""
        return any(node_id in json.loads(text)["claims"] for text, _ in self._seen.values())

    def tick(self) -> None:
        """Say that this campaign lives, and read what the others say; does nothing before the next beat."""
        if self._board is None or self._clock() < self._next:
            return
        if self._clock() >= self._next_word:
            self._say()
        rows, now = self._board.read(besides=self._key), self._clock()
        self._next = now + BEAT_S
        seen: dict[str, tuple[str, float]] = {}
        for key, text in rows.items():
            known = self._seen.get(key)
            since = known[1] if known is not None and known[0] == text else now
            if now - since <= SILENCE_S:
                seen[key] = (text, since)
            else:
                self._board.erase(key)
        self._seen = seen

    def close(self) -> None:
        """Leave the board."""
        if self._board is not None:
            self._board.erase(self._key)

    def _say(self) -> None:
        if self._board is None:
            return
        self._words += 1
        self._next_word = self._clock() + WORD_S
        self._board.write(self._key, json.dumps({"word": self._words, "claims": sorted(self._claims)}))


class ClusterBoard:
    """A board (coordination.py) in the key-value table of the cluster's head. While the head does not answer, it is empty.

    Args:
        head: of the cluster.
    """

    def __init__(self, head: Head) -> None:
        self._head = head

    def read(self, *, besides: str) -> Mapping[str, str]:
        """All of it but one row.

        Raises:
            InfrastructureError: the head stays silent.
        """
        rows: dict[str, str] = {}
        with reported_by(self._head) as answers:
            for key in internal_kv._internal_kv_list(BOARD, namespace=NAMESPACE) if answers else ():
                name = key.decode().removeprefix(BOARD)
                value = None if name == besides else internal_kv._internal_kv_get(key, namespace=NAMESPACE)
                if value is not None:
                    rows[name] = value.decode()
        return rows

    def write(self, key: str, value: str) -> None:
        """Set one row."""
        with reported_by(self._head) as answers:
            if answers:
                internal_kv._internal_kv_put(f"{BOARD}{key}", value, overwrite=True, namespace=NAMESPACE)

    def erase(self, key: str) -> None:
        """Remove one row; it need not be there."""
        if not self._head.is_silent:
            with contextlib.suppress(RuntimeError, OSError, ray.exceptions.RayError):
                internal_kv._internal_kv_del(f"{BOARD}{key}", namespace=NAMESPACE)


@contextlib.contextmanager
def reported_by(head: Head) -> Iterator[bool]:
    """Whether the head can be asked; what it says wrong of its table is no loss."""
    answers = head.answers()
    with contextlib.suppress(RuntimeError, OSError, ray.exceptions.RayError):
        yield answers
