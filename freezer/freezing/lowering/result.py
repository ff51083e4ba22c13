"""Wall time of the phases of a build, which a report shows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from freezer.artifact.freezing_report import FreezingReport


@contextlib.contextmanager
def timed(phases_s: dict[str, float], name: str) -> Iterator[None]:
    """Note under a name how many seconds the block takes, unless it raises."""
    started = time.monotonic()
    yield
    phases_s[name] = time.monotonic() - started


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowered:
    """What a lowering says of the payload that it wrote.

    Attributes:
        report: without sizes, phases of the capture, and memory, which the build adds.
        texts: by file name, readable forms of the frozen model: `code.txt`, `graph.txt`.
        layouts: how packed weights are laid out, by dtype.
    """

    report: FreezingReport = field(default_factory=FreezingReport)
    texts: Mapping[str, str] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
