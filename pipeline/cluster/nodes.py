"""Nodes of a cluster and handles of running tasks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from freezer.hardware.device_classes import DEVICE_CLASSES

LABEL = "coldpress.dev/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A live node of the cluster and the device classes that it serves; `portable` is always among them.

    Attributes:
        memory_bytes: that Ray gives out there; None where it gives out none.
        labelled: whether it carries a label of ours at all.
    """

    node_id: str
    num_cpus: int
    classes: tuple[str, ...]
    num_gpus: int = 0
    memory_bytes: int | None = None
    labelled: bool = True


def classes_of(nodes: Collection[Node]) -> tuple[str, ...]:
    """Every class that some of these nodes serve, in the order of DEVICE_CLASSES."""
    found = {name for node in nodes for name in node.classes}
    return tuple(name for name in DEVICE_CLASSES if name in found)


@dataclass(frozen=True, slots=True)
class Handle:
    """A task under way."""

    ref: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A task that ended: its value, or the infrastructure's failure in one sentence.

    Attributes:
        lost: whether its worker or node was lost with it, and not just the task.
        kind: of the failure, in pipeline/failures/policy.py.
    """

    handle: Handle
    value: Any = None
    failure: str | None = None
    lost: bool = False
    kind: str = "infrastructure"
