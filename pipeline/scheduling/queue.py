"""Placement: which node does what next. Plain bookkeeping, without Ray.

A node builds or judges, and never both at once. While it builds, it is given so many builds that no core waits for the driver, and
no more, so that a fast node takes more of them than a slow one. Its turn to judge comes when enough items wait for a judge, or when
it has nothing to build; then no builds are given to it, and when its last one ends its judges run, one after the other.
Other nodes go on meanwhile.

Of the classes that a node serves, the one that is furthest behind in the catalog comes first, in steps of `WINDOW` items: so no
class starves, and models are published throughout a campaign. Within a step, those that few nodes serve come first, and a node
stays with one class while it can, since a worker serves one class, and another costs a Python, a Ray and a torch import.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar

from pipeline.cluster.nodes import Node
from pipeline.planning.memory_estimate import Demand
from pipeline.scheduling.slots import Slot, takes_gpu

WINDOW = 32
"""Items of the catalog within which a node may stay with one class."""

LOOK_AHEAD = 32
"""Tasks of one class that are looked at for one that fits a node."""


class Placeable(Protocol):
    """A task, as far as its place goes by it."""

    @property
    def device_class(self) -> str:
        """That its node must serve."""

    @property
    def least_cpus(self) -> int:
        """That its node must have."""

    @property
    def index(self) -> int:
        """Of its item in the plan."""

    @property
    def avoid(self) -> Collection[str]:
        """Ids of nodes where it failed."""

    @property
    def demand(self) -> Demand:
        """Of memory."""


_Task = TypeVar("_Task", bound=Placeable)


class Queue(Generic[_Task]):
    """Tasks that wait, a line for each class."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[_Task]] = {}

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def __iter__(self) -> Iterator[_Task]:
        return (task for line in self._lines.values() for task in line)

    def append(self, task: _Task) -> None:
        """Add a task at the end of its line."""
        self._lines.setdefault(task.device_class, deque()).append(task)

    def appendleft(self, task: _Task) -> None:
        """Add a task that comes first in its line."""
        self._lines.setdefault(task.device_class, deque()).appendleft(task)

    def counts(self) -> dict[str, int]:
        """How many wait, by class."""
        return {name: len(line) for name, line in self._lines.items() if line}

    def line(self, name: str) -> Iterator[_Task]:
        """Those of one class, in their order."""
        return iter(self._lines.get(name, ()))

    def num_for(self, node: Node) -> int:
        """How many wait for a class that a node serves."""
        return sum(len(self._lines.get(name, ())) for name in node.classes)

    def take(self, slot: Slot, nodes: Collection[Node]) -> _Task | None:
        """Take out the task that a node should be given next; None where none fits it.

        Args:
            slot: of the node.
            nodes: all that are in use.
        """
        serving = {name: sum(name in node.classes for node in nodes) for name in slot.node.classes}
        lines = [(name, line) for name in slot.node.classes if (line := self._lines.get(name)) and slot.takes(name)]
        lines.sort(key=lambda item: (item[1][0].index // WINDOW, serving[item[0]], item[0] != slot.last_class))
        for _, line in lines:
            for place, task in enumerate(islice(line, LOOK_AHEAD)):
                if fits(task, slot.node, nodes):
                    del line[place]
                    return task
        return None

    def remove(self, tasks: Iterable[_Task]) -> None:
        """Take out these tasks."""
        gone = {id(task) for task in tasks}
        for name, line in self._lines.items():
            self._lines[name] = deque(task for task in line if id(task) not in gone)


def fits(task: Placeable, node: Node, nodes: Collection[Node]) -> bool:
    """Whether a task may run on a node; on one where it failed only if no other is left."""
    if not _hopeful(task, node, nodes):
        return False
    left = (other for other in nodes if other.node_id not in task.avoid)
    return node.node_id not in task.avoid or not any(_hopeful(task, other, nodes) for other in left)


def _hopeful(task: Placeable, node: Node, nodes: Collection[Node]) -> bool:
    """Whether a task can run on a node; what had too little memory once has no hope there while a larger one can take it."""
    if not _can(task, node):
        return False
    asked = task.demand.asked if task.demand.firm else 0
    return not (_has_less(node, asked) and any(_can(task, other) and _is_larger(other, node) for other in nodes))


def _can(task: Placeable, node: Node) -> bool:
    return serves(task, node) and (node.memory_bytes is None or task.demand.least <= node.memory_bytes)


def _has_less(node: Node, size: int) -> bool:
    return node.memory_bytes is not None and node.memory_bytes < size


def _is_larger(node: Node, other: Node) -> bool:
    return other.memory_bytes is not None and not _has_less(node, other.memory_bytes + 1)


def serves(task: Placeable, node: Node) -> bool:
    """Whether a node is of a task's class, and has the cores and the GPU that it needs."""
    has_gpu = node.num_gpus > 0 or not takes_gpu(task.device_class)
    return task.device_class in node.classes and node.num_cpus >= task.least_cpus and has_gpu


def ask_bytes(demand: Demand, node: Node) -> int | None:
    """The memory to ask of a node: an estimate that is larger than the node is cut to all that it has."""
    return None if node.memory_bytes is None else min(demand.asked, node.memory_bytes)


def missing(task: Placeable, nodes: Collection[Node]) -> str | None:
    """Why no node has the memory that a task needs, in one sentence; None where one has, or none serves its class at all."""
    largest = [node.memory_bytes for node in nodes if serves(task, node)]
    if not largest or any(size is None or size >= task.demand.least for size in largest):
        return None
    most = max(size for size in largest if size is not None)
    return (
        f"needs {task.demand.least / 1e9:.1f} GB of memory, and the largest node that serves {task.device_class} gives out "
        f"{most / 1e9:.1f} GB; start a larger one, or lower limits.memory_gb if it is set"
    )
