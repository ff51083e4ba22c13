"""Turns: campaigns on one cluster agree on which nodes are about to be judged on. Imports no ray.

A judge asks Ray for all cores of a node, so nothing runs beside it, whoever started it. But Ray keeps no cores free for a task
that waits for all of them: on a node that small tasks keep coming to, it would wait for ever. So a campaign that wants to judge on
a node says so on a board that all campaigns of the cluster read, and the others start no builds there until it is done.

What is on the board is soft: a driver that stops beating is forgotten, by each reader's own clock, so that clocks may differ.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Protocol

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
