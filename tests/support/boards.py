"""A board of campaigns in this process, and a clock that tests set."""

from __future__ import annotations

from collections.abc import Mapping


class DictBoard:
    """A board in this process."""

    def __init__(self) -> None:
        self.rows: dict[str, str] = {}

    def read(self) -> Mapping[str, str]:
        return dict(self.rows)

    def write(self, key: str, value: str) -> None:
        self.rows[key] = value

    def erase(self, key: str) -> None:
        self.rows.pop(key, None)


class Clock:
    """A clock that tests set."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
