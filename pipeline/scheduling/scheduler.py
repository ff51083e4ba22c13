"""Decide which tasks start on which nodes, by the rules of queue.py, in turns with other
campaigns.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain

from pipeline.cluster import REST_S, Ask, ClusterBoard, Done, Node, Turns
from pipeline.failures import CODES
from pipeline.planning import BASE_BYTES
from pipeline.records import Event, Failure
from pipeline.scheduling.fleet import Fleet
from pipeline.scheduling.queue import Queue, Slot, Task, begins_turn, ends_turn, missing, serves

CHECK_S = 5.0
"""Interval between two checks whether each waiting task has a node that could serve it."""

JUDGE_HELD_S = 60.0
"""Time after which a judge that has not started is reported: longer than a judge usually takes."""

MAX_ASKED = 2
"""Cores to request for each core that a class has, so a fleet grows by doubling."""


class Places:
    """The slots of a fleet, and the tasks that wait for them.

    Args:
        fleet: the nodes.
        show: takes the events.

    Attributes:
        waiting, ready: builds and judges that wait; a task is removed when a node gets it.
        turns: of the campaigns of the cluster.
    """

    def __init__(self, fleet: Fleet, show: Callable[[Event], None]) -> None:
        self._fleet, self._show = fleet, show
        self.waiting, self.ready = Queue(), Queue()
        self.turns = Turns(ClusterBoard(fleet.cluster.head) if fleet.cluster.joined else None)
        self._slots: dict[str, Slot] = {}
        self._under_way: set[Task] = set()
        self._without_node: dict[str, float] = {}
        self._unserved: dict[str, Ask] = {}
        self._next_check = 0.0

    def tick(self) -> None:
        """Update nodes and turns, and ask the autoscaler for what is missing."""
        self._fleet.tick()
        self.turns.tick()
        nodes = {node.node_id: node for node in self._fleet.nodes}
        for node_id in self._slots.keys() - nodes.keys():
            del self._slots[node_id]
            self.turns.release(node_id)
        for node_id in (
            nodes.keys() - self._slots.keys()
        ):  # a node that did not answer for a while still runs its tasks
            self._slots[node_id] = slot = Slot(node=nodes[node_id])
            for task in self._under_way:
                if task.node and task.node.node_id == node_id:
                    slot.begin(task)
        self._report_held()
        self._fleet.ask(self._asks())

    def judges(self, may_start: Callable[[Task], bool]) -> Iterator[tuple[Slot, Task]]:
        """Yield the judges to start now, each with its slot, and begin and end turns."""
        for slot in self._slots.values():
            ready, waiting, node_id = (
                self.ready.num_for(slot.node),
                self.waiting.num_for(slot.node),
                slot.node.node_id,
            )
            if ends_turn(slot, ready=ready, waiting=waiting, others=self.turns.others):
                self._end_turn(slot)
            if begins_turn(
                slot, self._slots.values(), ready=ready, waiting=waiting, now=time.monotonic()
            ):
                slot.turn = True
            if not slot.turn or slot.judge or slot.builds:
                continue
            task = self.ready.take(slot, self._fleet.nodes)
            if task is None:
                self._end_turn(slot)
            elif not may_start(task):
                self.ready.appendleft(task)
                if slot.num_judged and self.turns.others:  # one of them may wait for this node
                    self._end_turn(slot)
            else:
                if not slot.num_judged:
                    self.turns.claim(node_id)
                yield slot, task

    def builds(self, may_start: Callable[[Task], bool]) -> Iterator[tuple[Slot, list[Task]]]:
        """Yield the groups of builds to start now, one for each building node in turn, the least
        loaded first.

        A group has builds of one item, at most a core's share of those that wait (guided
        self-scheduling, Polychronopoulos and Kuck 1987). With limits.build_s, it has all of them,
        to be built one after the other.
        """
        num_cpus = sum(slot.node.num_cpus for slot in self._slots.values())
        open_ = [slot for slot in self._slots.values() if not self.turns.claimed(slot.node.node_id)]
        while open_:
            for slot in sorted(open_, key=lambda slot: slot.builds / slot.node.num_cpus):
                num_waiting = self.waiting.num_for(slot.node)
                task = (
                    self.waiting.take(slot, self._fleet.nodes)
                    if slot.has_room(num_waiting, num_cpus)
                    else None
                )
                if task is not None and may_start(task):
                    share = (
                        math.ceil(num_waiting / num_cpus)
                        if task.item.entry.limits.build_s is None
                        else num_waiting
                    )
                    yield slot, [task, *self.waiting.take_alike(task, share - 1)]
                    continue
                if task is not None:
                    self.waiting.appendleft(task)
                open_.remove(slot)

    def enter(self, tasks: Sequence[Task], slot: Slot) -> None:
        """Record that a group of builds, or one judge, was started in a slot."""
        slot.begin(tasks[0])
        for task in tasks:
            task.node = slot.node
        self._under_way.add(tasks[0])

    def leave(self, tasks: Sequence[Task], done: Done) -> None:
        """Record that a group of builds, or one judge, ended or was lost."""
        task = tasks[0]
        assert task.node is not None
        self._under_way.discard(task)
        if slot := self._slots.get(task.node.node_id):
            slot.end(task)
        if done.lost:
            self._fleet.doubt(task.node)

    def judges_here(self) -> bool:
        """Whether a judge runs on the driver's node, or another campaign has its turn there."""
        home = self._fleet.cluster.home
        here = self._slots.get(home)
        return here is not None and (here.judge or self.turns.claimed(home))

    def given_up(self) -> list[tuple[Task, Failure]]:
        """Remove and return the tasks that no node can serve: without enough memory at once,
        without a node after some time.
        """
        nodes, now = self._fleet.nodes, time.monotonic()
        if now < self._next_check:
            return []
        self._next_check = now + CHECK_S
        gone: list[tuple[Task, Failure]] = []
        without: dict[str, float] = {}
        self._unserved = _unserved((*self.waiting, *self.ready, *self._under_way), nodes)
        for task in (*self.waiting, *self.ready):
            too_large, name = missing(task, nodes), task.device_class
            if too_large is not None:
                gone.append((task, Failure(kind="memory", code=CODES["memory"], message=too_large)))
            elif not any(serves(task, node) for node in nodes):
                without[name] = since = self._without_node.get(name, now)
                if now - since >= self._fleet.patience_s:
                    why = (
                        f"no node serves {name} with {task.least_cpus} CPUs, for {now - since:.0f}"
                        " s; start one, and run again"
                    )
                    gone.append(
                        (task, Failure(kind="infrastructure", code="CP-NO-NODE", message=why))
                    )
        for name in without.keys() - self._without_node.keys():
            self._show(
                Event(
                    kind="note",
                    text=(
                        f"no node serves {name} now; waiting up to {self._fleet.patience_s:g} s"
                        " for one"
                    ),
                )
            )
        self._without_node = without
        for queue in (self.waiting, self.ready):
            queue.remove({task for task, _ in gone})
        return gone

    def _end_turn(self, slot: Slot) -> None:
        slot.turn, slot.num_judged = False, 0
        slot.rests_until = time.monotonic() + (REST_S if self.turns.others else 0)
        self.turns.release(slot.node.node_id)

    def _report_held(self) -> None:
        """Report once each judge that waits because something else runs on its node."""
        for slot in self._slots.values():
            if (
                slot.judge
                and slot.judge_since is not None
                and time.monotonic() >= slot.judge_since + JUDGE_HELD_S
            ):
                slot.judge_since = None
                if held := self._fleet.cluster.held(slot.node):
                    what = f"judge waits for node {slot.node.node_id[:12]}: {held}"
                    self._show(
                        Event(kind="note", text=f"{what}; it starts when nothing else runs there")
                    )

    def _asks(self) -> Counter[Ask]:
        """Return what to ask an autoscaler for: a node for each class that has none for its largest
        task, and for other classes nodes for the waiting tasks, up to a doubling of the cores.
        """
        asked = Counter(self._unserved.values())
        for name in {*self.waiting.counts(), *self.ready.counts()} - self._unserved.keys():
            num_cpus = MAX_ASKED * sum(
                slot.node.num_cpus for slot in self._slots.values() if name in slot.node.classes
            )
            for task in chain(self.waiting.line(name), self.ready.line(name)):
                num_cpus -= task.least_cpus
                if num_cpus < 0:
                    break
                asked[_ask_of(task, task.least_cpus)] += 1
        return asked


def _ask_of(task: Task, num_cpus: int) -> Ask:
    """Return what to ask for a task.

    A memory estimate is not part of it, since a task runs with less if no node has as much.
    """
    least = task.demand.least
    return Ask(
        device_class=task.device_class,
        num_cpus=num_cpus,
        memory_bytes=least if least > BASE_BYTES else None,
    )


def _unserved(tasks: Iterable[Task], nodes: Collection[Node]) -> dict[str, Ask]:
    """Return, by class, the needs of the largest task that no node can serve, or whose judge no
    node can.
    """
    largest: dict[str, Ask] = {}
    for task in tasks:
        if not any(serves(task, node) and node.num_cpus >= task.judge_cpus for node in nodes):
            ask = _ask_of(task, task.judge_cpus)
            largest[ask.device_class] = max(
                ask,
                largest.get(ask.device_class, ask),
                key=lambda found: (found.num_cpus, found.memory_bytes or 0),
            )
    return largest
