"""Queues of tasks, the slots of nodes, and which task a node gets next. Plain bookkeeping, without
Ray.

A judge goes first: it is an ordinary task beside the builds, which pause while it measures latency
(pipeline/workspace/machine_time.py). A node gets a task for each of its cores, so a fast node takes
more of them than a slow one.

A node takes the class that is furthest behind in the catalog, in steps of `WINDOW` items, so models
are published throughout a campaign. Within a step, classes that few nodes serve come first, then
those beside which `portable` can be built or judged, and a node stays with its class if it can: a
worker serves one class, and another one needs a new Python process that imports Ray and torch.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice

from freezer.freezing.recipes import needs_torch_alone
from freezer.hardware import PORTABLE, device_class
from pipeline.cluster import Node
from pipeline.planning import BETTER_CPU, Demand, Item
from pipeline.scheduling.item_state import ItemState

WINDOW = 8
"""Items of the catalog within which a node may stay with one class."""

LOOK_AHEAD = 32
"""Tasks of a class to search for one that fits a node."""


@dataclass(kw_only=True, eq=False)
class Progress:
    """The current state of an item.

    Attributes:
        index: its position in the plan.
        beside: of `portable`, the item of a CPU class whose judge can judge it, too.
    """

    state: ItemState
    index: int
    beside: Progress | None = None


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
        return max(*self.item.threads, 1)

    @property
    def least_cpus(self) -> int:
        """CPUs that the task needs."""
        return 1 if self.recipe else self.judge_cpus

    @property
    def needs_best(self) -> bool:
        """Whether its class must be the best one of its node: engines cannot be limited to a
        lesser one, and the plan has found such a node.
        """
        builds = self.item.builds
        recipes = (self.recipe,) if self.recipe else self.progress.state.built
        engines = [recipe for recipe in recipes if not needs_torch_alone(recipe)]
        return any(BETTER_CPU not in builds[recipe].parts for recipe in engines)

    @property
    def avoid(self) -> Collection[str]:
        """Ids of nodes where it failed."""
        return self.progress.state.attempts_of(self.recipe).avoid

    @property
    def demand(self) -> Demand:
        """Memory to request from a node."""
        return self.progress.state.demand_of(self.recipe)


@dataclass(kw_only=True)
class Slot:
    """The tasks that the driver gave to a node.

    Attributes:
        running: judges in flight, and the first build of each group.
        last_class: class of the last task.
    """

    node: Node
    running: list[Task] = field(default_factory=list)
    last_class: str = ""

    @property
    def num_gpu_tasks(self) -> int:
        """Number of tasks that take a GPU."""
        return sum(takes_gpu(task.device_class) for task in self.running)

    @property
    def judging_cpus(self) -> int:
        """CPUs that the judges need."""
        return sum(task.judge_cpus for task in self.running if task.recipe is None)

    def begin(self, task: Task) -> None:
        """Record that a task was submitted."""
        self.last_class = task.device_class
        self.running.append(task)


def takes_gpu(name: str) -> bool:
    """Whether tasks of a device class need a GPU."""
    return device_class(name).kind == "cuda"


class Queue:
    """Tasks that wait, in a line for each class."""

    def __init__(self) -> None:
        self._lines: defaultdict[str, deque[Task]] = defaultdict(deque)

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Task]:
        return chain.from_iterable(self._lines.values())

    def add(self, task: Task, *, first: bool = False) -> None:
        """Add a task to the end of its line, or to its front."""
        line = self._lines[task.device_class]
        if first:
            line.appendleft(task)
        else:
            line.append(task)

    def num_for(self, node: Node, nodes: Collection[Node]) -> int:
        """Return the number of tasks of the classes of which a node may take one now."""
        num_tasks = 0
        for name in node.classes:
            first = islice(self._lines[name], LOOK_AHEAD)
            if any(fits(task, node, nodes) for task in first):
                num_tasks += len(self._lines[name])
        return num_tasks

    def take(self, slot: Slot, nodes: Collection[Node]) -> Task | None:
        """Remove and return the next task for a node; None if none fits.

        Args:
            slot: slot of the node.
            nodes: all nodes in use.
        """

        def urgency(name: str) -> tuple[int, int, bool, bool]:
            window = self._lines[name][0].progress.index // WINDOW
            num_nodes = sum(name in node.classes for node in nodes)
            return window, num_nodes, name == PORTABLE, name != slot.last_class

        classes = [name for name in slot.node.classes if self._lines[name]]
        if slot.num_gpu_tasks >= slot.node.num_gpus:
            classes = [name for name in classes if not takes_gpu(name)]
        for name in sorted(classes, key=urgency):
            for task in islice(self._lines[name], LOOK_AHEAD):
                if fits(task, slot.node, nodes):
                    self._lines[name].remove(task)
                    return task
        return None

    def take_alike(self, task: Task, most: int, slot: Slot, nodes: Collection[Node]) -> list[Task]:
        """Remove and return builds of the same item as a build that was just taken, with the same
        failed attempts, which the node may build.
        """
        state = task.progress.state
        line = self._lines[task.device_class]
        attempts = state.attempts_of(task.recipe)
        alike = [
            build
            for build in islice(line, 2 * LOOK_AHEAD)
            if build.progress is task.progress
            and state.attempts_of(build.recipe) == attempts
            and fits(build, slot.node, nodes)
        ]
        self.remove(alike[:most])
        return alike[:most]

    def take_portable(self, task: Task, slot: Slot, nodes: Collection[Node]) -> list[Task]:
        """Remove and return the build or judge of `portable` for the model of one of a CPU class,
        which shares its captures or reference, if the node may run it.
        """
        item = task.item
        line = self._lines[PORTABLE]
        if item.device_class == PORTABLE or takes_gpu(item.device_class):
            return []
        alike = (item.entry.name, item.num_threads)
        for other in islice(line, LOOK_AHEAD):
            failures = other.progress.state.attempts_of(other.recipe).failures
            is_alike = (other.item.entry.name, other.item.num_threads) == alike
            if is_alike and not failures and fits(other, slot.node, nodes):
                line.remove(other)
                return [other]
        return []

    def remove(self, tasks: Collection[Task]) -> None:
        """Remove tasks, if they wait here."""
        for task in tasks:
            with suppress(ValueError):
                self._lines[task.device_class].remove(task)


def fits(task: Task, node: Node, nodes: Collection[Node]) -> bool:
    """Whether a task may run on a node; a node where it failed is used only if no other is left."""
    if not _suits(task, node, nodes):
        return False
    if node.node_id not in task.avoid:
        return True
    others = [other for other in nodes if other.node_id not in task.avoid]
    return not any(_suits(task, other, nodes) for other in others)


def _suits(task: Task, node: Node, nodes: Collection[Node]) -> bool:
    """Whether a task can run on a node.

    After a failure for lack of memory, a larger node is preferred to one with too little.
    """
    memory = memory_of(node)
    demand = task.demand
    if not serves(task, node) or memory < demand.least:
        return False
    if not _prefers(task, node) and any(
        serves(task, each) and _prefers(task, each) for each in nodes
    ):
        return False
    if not demand.firm or memory >= demand.asked:
        return True
    return not any(serves(task, other) and memory_of(other) > memory for other in nodes)


def _prefers(task: Task, node: Node) -> bool:
    """Whether a node is preferred: like the driver's for `portable`, with a real CPU to judge."""
    if task.device_class == PORTABLE:
        return node.is_like_the_driver
    return task.recipe is not None or not node.emulated


def memory_of(node: Node) -> float:
    """Return the memory of a node in bytes; infinite if Ray limits no memory there."""
    return math.inf if node.memory_bytes is None else node.memory_bytes


def serves(task: Task, node: Node) -> bool:
    """Whether a node serves the class of a task, and has the cores, the GPU and the CPU that it
    needs.
    """
    has_gpu = node.num_gpus > 0 or not takes_gpu(task.device_class)
    if task.device_class not in node.classes or node.num_cpus < task.least_cpus or not has_gpu:
        return False
    return task.device_class not in node.lesser or not task.needs_best


def memory_to_reserve(demand: Demand, node: Node) -> int | None:
    """Return the memory to request from a node: at most all that it has."""
    return None if node.memory_bytes is None else min(demand.asked, node.memory_bytes)
