"""Queues of tasks, the slots of nodes, and which task a node gets next. Plain bookkeeping, without
Ray.

A node either builds or judges. A building node gets enough builds that no core waits for the
driver, and no more, so a fast node takes more of them than a slow one. Its turn to judge comes when
enough items wait for a judge, or when it has nothing to build.

A node takes the class that is furthest behind in the catalog, in steps of `WINDOW` items, so models
are published throughout a
campaign. Within a step, classes that few nodes serve come first, and a node stays with its class if
it can: a worker serves one class, and another one needs a new Python process that imports Ray and
torch.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice

from freezer.hardware import device_class
from pipeline.cluster import Node
from pipeline.planning import Demand, Item
from pipeline.scheduling.item_state import ItemState

JUDGE_BATCH = 16
"""Judges in one turn, and items that wait before another node takes a turn."""

QUEUE_PER_CPU = 2
"""Builds in flight for each core, so that no worker waits for the driver."""

WINDOW = 32
"""Items of the catalog within which a node may stay with one class."""

LOOK_AHEAD = 32
"""Tasks of a class to search for one that fits a node."""


@dataclass(kw_only=True, eq=False)
class Progress:
    """The current state of an item; `index` is its position in the plan."""

    state: ItemState
    index: int


@dataclass(kw_only=True, eq=False)
class Task:
    """A queued or running build, or a judge if `recipe` is None; `node` is where it was started
    last.

    Builds of one item are started in groups, which share the loaded model and its captures.
    """

    progress: Progress
    recipe: str | None
    node: Node | None = None

    @property
    def item(self) -> Item:
        """Its item."""
        return self.progress.state.item

    @property
    def device_class(self) -> str:
        """The device class of the item."""
        return self.item.device_class

    @property
    def judge_cpus(self) -> int:
        """CPUs that the judge of the item needs: one for each thread."""
        return max(self.item.num_threads, *self.item.further_threads, 1)

    @property
    def least_cpus(self) -> int:
        """CPUs that the task needs."""
        return 1 if self.recipe else self.judge_cpus

    @property
    def avoid(self) -> Collection[str]:
        """Ids of nodes where it failed."""
        return self.progress.state.attempts_of(self.recipe).avoid

    @property
    def demand(self) -> Demand:
        """Memory to request from a node."""
        return self.progress.state.demand_of(self.recipe)

    @property
    def label(self) -> str:
        """`model class recipe`; a judge has no recipe."""
        return self.item.label(self.recipe)


@dataclass(kw_only=True)
class Slot:
    """The tasks that the driver gave to a node.

    Attributes:
        builds: groups of builds in flight, running or waiting for a core; `gpu_builds` of them take
            a GPU.
        judge: whether one is in flight.
        turn: whether it is the node's turn to judge; it then gets no builds.
        num_judged: judges of this turn, including the one in flight.
        judge_since: when the judge in flight was submitted; None once the wait has been reported.
        last_class: of the last task.
        rests_until: when the next turn may begin.
    """

    node: Node
    builds: int = 0
    gpu_builds: int = 0
    judge: bool = False
    turn: bool = False
    num_judged: int = 0
    judge_since: float | None = None
    last_class: str = ""
    rests_until: float = 0.0

    def has_room(self, num_waiting: int, num_cpus: int) -> bool:
        """Whether the node may get a build.

        When few wait, it gets one per core, so that the last builds do not queue.
        """
        depth = QUEUE_PER_CPU if num_waiting > num_cpus else 1
        return not self.turn and not self.judge and self.builds < depth * self.node.num_cpus

    def begin(self, task: Task) -> None:
        """Record that a task was submitted."""
        self.last_class = task.device_class
        if task.recipe is None:
            self.judge = self.turn = True
            self.judge_since = time.monotonic()
            self.num_judged += 1
        else:
            self.builds += 1
            self.gpu_builds += takes_gpu(task.device_class)

    def end(self, task: Task) -> None:
        """Record that a task ended."""
        if task.recipe is None:
            self.judge = False
        else:
            self.builds -= 1
            self.gpu_builds -= takes_gpu(task.device_class)

    def takes(self, name: str) -> bool:
        """Whether the GPUs allow another task of a class."""
        return not takes_gpu(name) or self.gpu_builds < QUEUE_PER_CPU * self.node.num_gpus


def takes_gpu(name: str) -> bool:
    """Whether tasks of a device class need a GPU."""
    return device_class(name).kind == "cuda"


def begins_turn(
    slot: Slot, slots: Collection[Slot], *, ready: int, waiting: int, now: float
) -> bool:
    """Whether a building node should judge now.

    Args:
        slot: of the node.
        slots: of all nodes.
        ready, waiting: judges and builds that wait, of classes that the node serves.
        now: monotonic time, in seconds.
    """
    if slot.turn or not ready or now < slot.rests_until:
        return False
    taken = JUDGE_BATCH * sum(
        other.turn and bool(set(other.node.classes) & set(slot.node.classes)) for other in slots
    )
    return not waiting or ready - taken >= JUDGE_BATCH


def ends_turn(slot: Slot, *, ready: int, waiting: int, others: bool) -> bool:
    """Whether a judging node should build again, or be left to other campaigns; never while a judge
    runs.

    Args:
        slot: of the node.
        ready, waiting: as in `begins_turn`.
        others: whether other campaigns run on the cluster.
    """
    return (
        slot.turn
        and not slot.judge
        and (not ready or (slot.num_judged >= JUDGE_BATCH and (waiting > 0 or others)))
    )


class Queue:
    """Tasks that wait, in a line for each class."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Task]] = {}

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def __iter__(self) -> Iterator[Task]:
        return (task for line in self._lines.values() for task in line)

    def append(self, task: Task) -> None:
        """Add a task to the end of its line."""
        self._lines.setdefault(task.device_class, deque()).append(task)

    def appendleft(self, task: Task) -> None:
        """Add a task to the front of its line."""
        self._lines.setdefault(task.device_class, deque()).appendleft(task)

    def counts(self) -> dict[str, int]:
        """Number of tasks by class."""
        return {name: len(line) for name, line in self._lines.items() if line}

    def line(self, name: str) -> Iterator[Task]:
        """The tasks of a class, in order."""
        return iter(self._lines.get(name, ()))

    def num_for(self, node: Node) -> int:
        """Number of tasks of the classes that a node serves."""
        return sum(len(self._lines.get(name, ())) for name in node.classes)

    def take(self, slot: Slot, nodes: Collection[Node]) -> Task | None:
        """Remove and return the next task for a node; None if none fits.

        Args:
            slot: of the node.
            nodes: all nodes in use.
        """
        serving = {name: sum(name in node.classes for node in nodes) for name in slot.node.classes}
        lines = [
            (name, line)
            for name in slot.node.classes
            if (line := self._lines.get(name)) and slot.takes(name)
        ]
        lines.sort(
            key=lambda item: (
                item[1][0].progress.index // WINDOW,
                serving[item[0]],
                item[0] != slot.last_class,
            )
        )
        for _, line in lines:
            for place, task in enumerate(islice(line, LOOK_AHEAD)):
                if fits(task, slot.node, nodes):
                    del line[place]
                    return task
        return None

    def take_alike(self, task: Task, most: int) -> list[Task]:
        """Remove and return builds of the same item as a build that was just taken, with the same
        failed attempts.
        """
        state = task.progress.state
        line = self._lines[task.device_class]
        alike = [
            other
            for other in islice(line, 2 * LOOK_AHEAD)
            if other.progress is task.progress
            and state.attempts_of(other.recipe) == state.attempts_of(task.recipe)
        ][:most]
        for other in alike:
            line.remove(other)
        return alike

    def remove(self, tasks: Collection[Task]) -> None:
        """Remove tasks."""
        for name, line in self._lines.items():
            self._lines[name] = deque(task for task in line if task not in tasks)


def fits(task: Task, node: Node, nodes: Collection[Node]) -> bool:
    """Whether a task may run on a node; a node where it failed is used only if no other is left."""
    if not _suits(task, node, nodes):
        return False
    left = (other for other in nodes if other.node_id not in task.avoid)
    return node.node_id not in task.avoid or not any(_suits(task, other, nodes) for other in left)


def _suits(task: Task, node: Node, nodes: Collection[Node]) -> bool:
    """Whether a task can run on a node.

    After a failure for lack of memory, a larger node is preferred to one with too little.
    """
    if not _can(task, node):
        return False
    too_small = task.demand.firm and _memory(node) < task.demand.asked
    return not (
        too_small and any(_can(task, other) and _memory(other) > _memory(node) for other in nodes)
    )


def _can(task: Task, node: Node) -> bool:
    return serves(task, node) and _memory(node) >= task.demand.least


def _memory(node: Node) -> float:
    """The memory of a node in bytes; a node that Ray limits no memory on has any amount."""
    return math.inf if node.memory_bytes is None else node.memory_bytes


def serves(task: Task, node: Node) -> bool:
    """Whether a node serves the class of a task, and has the cores and the GPU that it needs."""
    has_gpu = node.num_gpus > 0 or not takes_gpu(task.device_class)
    return task.device_class in node.classes and node.num_cpus >= task.least_cpus and has_gpu


def ask_bytes(demand: Demand, node: Node) -> int | None:
    """Return the memory to request from a node: at most all that it has."""
    return None if node.memory_bytes is None else min(demand.asked, node.memory_bytes)


def missing(task: Task, nodes: Collection[Node]) -> str | None:
    """Return why no node that serves a task has enough memory for it; None if one has, or if none
    serves its class.
    """
    largest = max((_memory(node) for node in nodes if serves(task, node)), default=math.inf)
    if largest >= task.demand.least:
        return None
    return (
        f"needs {task.demand.least / 1e9:.1f} GB of memory, but the largest node that serves"
        f" {task.device_class} has {largest / 1e9:.1f} GB; start a larger one, or lower"
        " limits.memory_gb if it is set"
    )
