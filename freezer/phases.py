"""Wall time of the phases of a build, which a report shows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


@contextlib.contextmanager
def timed(phases_s: dict[str, float], name: str) -> Iterator[None]:
    """Note under a name how many seconds the block takes, unless it raises."""
    started = time.monotonic()
    yield
    phases_s[name] = time.monotonic() - started
