"""Result of a lowering, and wall times of its phases."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from freezer.artifact import FreezingReport


@contextlib.contextmanager
def timed(phases_s: dict[str, float], name: str) -> Iterator[None]:
    """Record the wall time of the block in seconds, unless it raises."""
    started = time.monotonic()
    yield
    phases_s[name] = time.monotonic() - started


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowered:
    """Result of a lowering.

    Attributes:
        report: the report, without sizes, time of the capture, and memory, which the build adds.
        texts: readable forms of the frozen model by file name: `code.txt`, `graph.txt`.
        layouts: layout of packed weights by dtype.
    """

    report: FreezingReport = field(default_factory=FreezingReport)
    texts: Mapping[str, str] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
