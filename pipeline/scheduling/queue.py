"""Queues of tasks, and which task a node gets next. Plain bookkeeping, without Ray.

A node either builds or judges. A building node gets enough builds that no core waits for the driver, and no more, so a fast node
takes more of them than a slow one. Its turn to judge comes when enough items wait for a judge, or when it has nothing to build
(slots.py).

A node takes the class that is furthest behind in the catalog, in steps of `WINDOW` items, so models are published throughout a
campaign. Within a step, classes that few nodes serve come first, and a node stays with its class if it can: a worker serves one
class, and another one needs a new Python process that imports Ray and torch.
"""

from __future__ import annotations

import math
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
"""Tasks of a class to search for one that fits a node."""


class Work(Protocol):
    """A build, or a judge if `recipe` is None.

    Attributes:
        node: where it was started last.
    """

    recipe: str | None
    node: Node | None

    @property
    def device_class(self) -> str:
        """Class that its node must serve."""

    @property
    def least_cpus(self) -> int:
        """CPUs that its node must have."""

    @property
    def judge_cpus(self) -> int:
        """CPUs that the judge of its item needs."""

    @property
    def index(self) -> int:
        """Position of its item in the plan."""

    @property
    def avoid(self) -> Collection[str]:
        """Ids of nodes where it failed."""

    @property
    def demand(self) -> Demand:
        """Memory that it needs."""


_Task = TypeVar("_Task", bound=Work)


class Queue(Generic[_Task]):
    """Tasks that wait, in a line for each class."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[_Task]] = {}

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def __iter__(self) -> Iterator[_Task]:
        return (task for line in self._lines.values() for task in line)

    def append(self, task: _Task) -> None:
        """Add a task to the end of its line."""
        self._lines.setdefault(task.device_class, deque()).append(task)

    def appendleft(self, task: _Task) -> None:
        """Add a task to the front of its line."""
        self._lines.setdefault(task.device_class, deque()).appendleft(task)

    def counts(self) -> dict[str, int]:
        """Number of tasks by class."""
        return {name: len(line) for name, line in self._lines.items() if line}

    def line(self, name: str) -> Iterator[_Task]:
        """The tasks of a class, in order."""
        return iter(self._lines.get(name, ()))

    def num_for(self, node: Node) -> int:
        """Number of tasks of the classes that a node serves."""
        return sum(len(self._lines.get(name, ())) for name in node.classes)

    def take(self, slot: Slot, nodes: Collection[Node]) -> _Task | None:
        """Remove and return the next task for a node; None if none fits.

        Args:
            slot: of the node.
            nodes: all nodes in use.
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
        """Remove tasks."""
        gone = {id(task) for task in tasks}
        for name, line in self._lines.items():
            self._lines[name] = deque(task for task in line if id(task) not in gone)


def fits(task: Work, node: Node, nodes: Collection[Node]) -> bool:
    """Whether a task may run on a node; a node where it failed is used only if no other is left."""
    if not _suits(task, node, nodes):
        return False
    left = (other for other in nodes if other.node_id not in task.avoid)
    return node.node_id not in task.avoid or not any(_suits(task, other, nodes) for other in left)


def _suits(task: Work, node: Node, nodes: Collection[Node]) -> bool:
    """Whether a task can run on a node. After a failure for lack of memory, a larger node is preferred to one with too little."""
    if not _can(task, node):
        return False
    too_small = task.demand.firm and _memory(node) < task.demand.asked
    return not (too_small and any(_can(task, other) and _memory(other) > _memory(node) for other in nodes))


def _can(task: Work, node: Node) -> bool:
    return serves(task, node) and _memory(node) >= task.demand.least


def _memory(node: Node) -> float:
    """The memory of a node in bytes; a node that Ray limits no memory on has any amount."""
    return math.inf if node.memory_bytes is None else node.memory_bytes


def serves(task: Work, node: Node) -> bool:
    """Whether a node serves the class of a task, and has the cores and the GPU that it needs."""
    has_gpu = node.num_gpus > 0 or not takes_gpu(task.device_class)
    return task.device_class in node.classes and node.num_cpus >= task.least_cpus and has_gpu


def ask_bytes(demand: Demand, node: Node) -> int | None:
    """Return the memory to request from a node: at most all that it has."""
    return None if node.memory_bytes is None else min(demand.asked, node.memory_bytes)


def missing(task: Work, nodes: Collection[Node]) -> str | None:
    """Return why no node that serves a task has enough memory for it; None if one has, or if none serves its class."""
    largest = max((_memory(node) for node in nodes if serves(task, node)), default=math.inf)
    if largest >= task.demand.least:
        return None
    return (
        f"needs {task.demand.least / 1e9:.1f} GB of memory, but the largest node that serves {task.device_class} has "
        f"{largest / 1e9:.1f} GB; start a larger one, or lower limits.memory_gb if it is set"
    )
