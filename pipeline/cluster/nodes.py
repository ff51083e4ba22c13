"""Nodes of a cluster, handles of running tasks and their results."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from freezer.hardware.device_classes import DEVICE_CLASSES

LABEL = "coldpress.dev/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A live node of the cluster and the device classes that it serves, including `portable`.

    Attributes:
        memory_bytes: memory that Ray schedules on the node, or None.
        labelled: whether the node has any Coldpress label.
    """

    node_id: str
    num_cpus: int
    classes: tuple[str, ...]
    num_gpus: int = 0
    memory_bytes: int | None = None
    labelled: bool = True


def classes_of(nodes: Collection[Node]) -> tuple[str, ...]:
    """Return the classes that the nodes serve, in the order of DEVICE_CLASSES."""
    found = {name for node in nodes for name in node.classes}
    return tuple(name for name in DEVICE_CLASSES if name in found)


@dataclass(frozen=True, slots=True)
class Handle:
    """A running task."""

    ref: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """Result of a task: its value, or the infrastructure's failure in one sentence.

    Attributes:
        lost: whether its worker or node was lost.
        kind: kind of the failure, as in pipeline/failures/policy.py.
    """

    handle: Handle
    value: Any = None
    failure: str | None = None
    lost: bool = False
    kind: str = "infrastructure"
