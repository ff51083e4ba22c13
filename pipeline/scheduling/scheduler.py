"""Decide which tasks start on which nodes, by the rules of queue.py."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from pipeline.cluster import Ask, Done, Node
from pipeline.failures import coded_failure
from pipeline.planning import BASE_BYTES
from pipeline.records import Failure
from pipeline.scheduling.fleet import Fleet
from pipeline.scheduling.queue import (
    Queue,
    Slot,
    Task,
    memory_of,
    serves,
)

CHECK_S = 5.0
"""Interval between two checks whether each waiting task has a node that could serve it."""

MAX_ASKED = 2
"""Cores to request for each core that a class has, so a fleet grows by doubling."""


class Scheduler:
    """Matches waiting tasks with the nodes of a fleet.

    Args:
        fleet: the nodes.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._builds = Queue()
        self._judges = Queue()
        self._beside = Queue()
        self._repeated = Queue()
        self._slots: dict[str, Slot] = {}  # also of nodes that left, and may return
        self._in_use: list[Slot] = []
        self._without_node: dict[str, float] = {}
        self._unserved: dict[str, Ask] = {}
        self._next_check = 0.0
        self._has_judged = False

    @property
    def num_waiting(self) -> int:
        """Number of builds and judges that wait for a node."""
        return sum(map(len, self._queues))

    @property
    def _queues(self) -> tuple[Queue, ...]:
        """The queues, in the order in which a node takes from them. Without anything else to do, it
        judges `portable` before the class beside which that would be shorter (as the first judge
        of all, so that an outcome comes soon), and repeats disturbed judges.
        """
        return self._judges, self._builds, self._beside, self._repeated

    def add(self, task: Task, *, first: bool = False) -> None:
        """Let a task wait for a node; `first` puts it before the others of its class."""
        queue = self._builds if task.recipe else self._judges
        beside = task.progress.beside
        if task.recipe is None and not first and task.progress.state.attempts_of(None).failures:
            queue = self._repeated
        elif task.recipe is None and beside and self._has_judged and not beside.state.is_built:
            queue = self._beside
        queue.add(task, first=first)

    def tick(self) -> None:
        """Update nodes, and ask the autoscaler for what is missing."""
        self._fleet.tick()
        self._in_use = []
        for node in self._fleet.nodes:
            slot = self._slots.setdefault(node.node_id, Slot(node=node))
            slot.node = node
            self._in_use.append(slot)
        self._fleet.ask(self._asks())

    def next_tasks(self) -> Iterator[tuple[Slot, list[Task]]]:
        """Yield the judges and the groups of builds to start now, one for each node with room in
        turn, the least loaded first.

        A group has builds of one model: of its item, at most a core's share of those that wait
        (guided self-scheduling, Polychronopoulos and Kuck 1987), and of `portable`. Until the first
        judge starts, all cores share the builds of one item, so that an outcome comes soon.
        """
        slots, nodes = list(self._in_use), self._fleet.nodes
        num_cpus = sum(slot.node.num_cpus for slot in slots)
        while slots:
            for slot in sorted(slots, key=lambda slot: len(slot.running) / slot.node.num_cpus):
                if len(slot.running) >= slot.node.num_cpus:
                    slots.remove(slot)
                elif judge := self._judge_for(slot, self._judges):
                    self._has_judged = True
                    portable = self._judges.take_portable(judge, slot, nodes)
                    yield slot, [judge, *portable, *self._beside.take_portable(judge, slot, nodes)]
                elif build := self._builds.take(slot, nodes):
                    num_waiting = len(build.item.builds)
                    if self._has_judged:
                        num_waiting = 1 + self._builds.num_for(slot.node, nodes)
                    num_tasks = math.ceil(num_waiting / num_cpus)
                    portable = self._builds.take_portable(build, slot, nodes)
                    alike = self._builds.take_alike(build, num_tasks - 1, slot, nodes)
                    yield slot, [build, *portable, *alike]
                elif judge := (
                    self._judge_for(slot, self._beside) or self._judge_for(slot, self._repeated)
                ):
                    yield slot, [judge]
                else:
                    slots.remove(slot)

    def _judge_for(self, slot: Slot, judges: Queue) -> Task | None:
        """A judge that would have its threads for itself."""
        has_room = slot.judging_cpus < slot.node.num_cpus
        return judges.take(slot, self._fleet.nodes) if has_room else None

    def record_start(self, tasks: Sequence[Task], slot: Slot) -> None:
        """Record that a group of builds, or one judge, was started in a slot."""
        slot.begin(tasks[0])
        for task in tasks:
            task.node = slot.node

    def record_end(self, task: Task, done: Done) -> None:
        """Record that one judge, or a group of builds with its first task, ended or was lost."""
        assert task.node is not None
        self._slots[task.node.node_id].running.remove(task)
        if done.lost:
            self._fleet.refresh_soon()

    def given_up(self) -> list[tuple[Task, Failure]]:
        """Remove and return the tasks that no node can serve: without enough memory at once,
        without a node after some time.
        """
        now = time.monotonic()
        if now < self._next_check:
            return []
        self._next_check = now + CHECK_S
        failed = {}
        without_node = {}
        self._unserved = {}
        started = {task for slot in self._slots.values() for task in slot.running}
        for task in (*chain.from_iterable(self._queues), *started):
            name = task.device_class
            serving = [node for node in self._fleet.nodes if serves(task, node)]
            if not any(node.num_cpus >= task.judge_cpus for node in serving):
                known = self._unserved.get(name, Ask(device_class=name))
                self._unserved[name] = _larger(known, task)
            if task in started:
                continue
            if not serving:
                since = without_node[name] = self._without_node.get(name, now)
                if now - since >= self._fleet.patience_s:
                    failed[task] = _without_node(task, now - since)
                continue
            problem = _lacks_memory(task, serving)
            if problem is not None:
                failed[task] = coded_failure("memory", problem)
        self._without_node = without_node
        for queue in self._queues:
            queue.remove(failed)
        return list(failed.items())

    def _asks(self) -> Counter[Ask]:
        """Return what to ask an autoscaler for: a node for each class that has none for its largest
        task, and for other classes cores for the waiting tasks, up to a doubling.
        """
        asked = Counter[Ask]()
        waiting = Counter(task.device_class for task in chain.from_iterable(self._queues))
        for name in waiting.keys() | self._unserved.keys():
            if name in self._unserved:
                asked[self._unserved[name]] = 1
                continue
            num_cpus = sum(slot.node.num_cpus for slot in self._in_use if name in slot.node.classes)
            asked[Ask(device_class=name)] = min(waiting[name], MAX_ASKED * num_cpus)
        return asked


def _larger(ask: Ask, task: Task) -> Ask:
    """What a node must have for a task, too. It omits estimates of memory, since a task
    runs with less if no node has as much.
    """
    least = max(task.demand.least, ask.memory_bytes or 0)
    return replace(
        ask,
        num_cpus=max(task.judge_cpus, ask.num_cpus),
        memory_bytes=least if least > BASE_BYTES else None,
    )


def _lacks_memory(task: Task, serving: Collection[Node]) -> str | None:
    """Return why none of the nodes that serve a task has enough memory for it; None if one has."""
    largest = max(map(memory_of, serving))
    if largest >= task.demand.least:
        return None
    return (
        f"needs {task.demand.least / 1e9:.1f} GB of memory, but the largest node that serves"
        f" {task.device_class} has {largest / 1e9:.1f} GB; start a larger one, or lower"
        " limits.memory_gb if it is set"
    )


def _without_node(task: Task, waited_s: float) -> Failure:
    best = " as its best class" if task.needs_best else ""
    served = f"{task.device_class}{best} with {task.least_cpus} CPUs"
    return Failure(
        kind="infrastructure",
        code="CP-NO-NODE",
        message=f"no node serves {served}, for {waited_s:.0f} s; start one, and run again",
    )
