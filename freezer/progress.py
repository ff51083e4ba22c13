"""Progress of a freeze: the messages of the logger `coldpress`, for a function or a terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("coldpress")


class _Lines(logging.Handler):
    """Passes each message on."""

    def __init__(self, show: Callable[[str], object]) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(record.getMessage())


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def reported(show: Callable[[str], object] | None) -> Iterator[None]:
    """Pass messages to a function while the block runs.

    Args:
        show: the function; None prints on a terminal, unless the caller configured the logger.
    """
    if show is None and (logger.isEnabledFor(logging.INFO) or not sys.stderr.isatty()):
        yield
        return
    handler, level = _Lines(show or _print), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


Watcher = Callable[[int, int], object]
"""Takes the number of bytes that were transferred, and that will be besides."""

_watchers: list[Watcher] = []


def transferred(num_bytes: int, planned_bytes: int = 0) -> None:
    """Report bytes that were transferred, and bytes that will be."""
    for watch in _watchers:
        watch(num_bytes, planned_bytes)


@contextmanager
def transfers(watch: Watcher) -> Iterator[None]:
    """Pass the transfers of all threads to a function while the block runs."""
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)
