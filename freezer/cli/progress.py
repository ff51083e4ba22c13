"""Progress of a long command: lines on stderr, more rarely the longer it takes, so that they do not
disturb measurements.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator

FIRST_S = 5.0
"""A command that takes longer than this says what it does."""

EVERY_S = 30.0


@contextlib.contextmanager
def progress() -> Iterator[None]:
    """Print the newest message of the logger `coldpress`, and its warnings at once, while the block
    runs.
    """
    step = _Step()
    logger = logging.getLogger("coldpress")
    level, ended = logger.level, threading.Event()
    logger.addHandler(step)
    logger.setLevel(logging.INFO)
    thread = threading.Thread(target=_report, args=(step, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        logger.setLevel(level)
        logger.removeHandler(step)


class _Step(logging.Handler):
    """Keeps the newest message; prints warnings."""

    text = "working"

    def emit(self, record: logging.LogRecord) -> None:
        """Take a message."""
        if record.levelno >= logging.WARNING:
            sys.stderr.write(f"{record.getMessage()}\n")
        else:
            self.text = record.getMessage()


def _report(step: _Step, ended: threading.Event) -> None:
    started, wait_s = time.monotonic(), FIRST_S
    while not ended.wait(wait_s):
        sys.stderr.write(f"{time.monotonic() - started:.0f} s: {step.text}\n")
        wait_s = EVERY_S
