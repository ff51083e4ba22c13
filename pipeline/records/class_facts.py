"""What the workers of a device class build and judge with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassFacts:
    """What the workers of a class build and judge with.

    Attributes:
        memory_bytes: what one item may use there when its entry sets no limit; None if nobody has looked.
    """

    num_threads: int
    toolchain: Mapping[str, Any]
    memory_bytes: int | None = None
