"""Facts about the workers of a device class."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from freezer.hardware import this_host

LABEL = "coldpress.dev/"
"""Prefix of the labels of a Ray node, followed by a device class that it serves; the value is
`true`.
"""

EMULATED = f"{LABEL}emulated"
"""Label of a node whose CPU is emulated: speeds are not measured there."""


def labels_of(classes: Collection[str]) -> dict[str, str]:
    """Return the labels of this machine as a Ray node that serves some classes."""
    labels = {f"{LABEL}{name}": "true" for name in classes}
    return labels | ({EMULATED: "true"} if this_host().emulated else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassFacts:
    """Toolchain and limits of the workers of a device class.

    Attributes:
        num_threads: CPUs of the smallest worker.
        toolchain: versions that are part of every build key.
        memory_bytes: memory for one item whose entry sets no limit; None if unknown.
        is_best: whether it is the best class of one of them. Earlier releases did not store it.
        emulated: whether the CPUs of all of them are emulated.
    """

    num_threads: int
    toolchain: Mapping[str, Any]
    memory_bytes: int | None = None
    is_best: bool = True
    emulated: bool = False
