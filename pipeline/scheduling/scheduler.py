"""Decide which tasks start on which nodes, by the rules of queue.py and slots.py, in turns with other campaigns."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Generic, TypeVar

from freezer.hardware.device_classes import PORTABLE
from pipeline.cluster.autoscaling import MAX_ASKED, Ask
from pipeline.cluster.coordination import REST_S, ClusterBoard, Turns
from pipeline.cluster.nodes import Done, Node
from pipeline.failures.classify import CODES
from pipeline.planning.memory_estimate import BASE_BYTES
from pipeline.records.events import Event
from pipeline.records.outcome import Failure
from pipeline.scheduling.fleet import Fleet
from pipeline.scheduling.queue import Queue, Work, missing, serves
from pipeline.scheduling.slots import Slot, begins_turn, by_load, ends_turn

CHECK_S = 2.0
"""Interval between two checks whether each waiting task has a node that could serve it, while the nodes stay the same."""

BEGUN_S = 20.0
"""Interval between two checks whether a judge runs; the second one that finds it waiting is reported."""


_Task = TypeVar("_Task", bound=Work)
_GivenUp = tuple[_Task, Failure]


class Places(Generic[_Task]):
    """The slots of a fleet, and the tasks that wait for them.

    Args:
        fleet: the nodes.
        waiting, ready: builds and judges that wait; a task is removed when a node gets it.
        show: takes the events.
    """

    def __init__(self, fleet: Fleet, waiting: Queue[_Task], ready: Queue[_Task], show: Callable[[Event], None]) -> None:
        self._fleet, self._waiting, self._ready, self._show = fleet, waiting, ready, show
        self._slots: dict[str, Slot] = {}
        self._turns: Turns | None = None
        self._under_way: dict[int, _Task] = {}
        self._without_node: dict[str, float] = {}
        self._unserved: dict[str, Ask] = {}
        self._checked_for: tuple[Node, ...] | None = None
        self._next_check = 0.0
        self._check_again = False
        self._next_held = 0.0

    @property
    def turns(self) -> Turns:
        """Turns of the campaigns of the cluster, created at the first use."""
        if self._turns is None:
            self._turns = Turns(ClusterBoard(self._fleet.cluster.head) if self._fleet.cluster.joined else None)
        return self._turns

    def tick(self) -> None:
        """Update nodes and turns, and ask the autoscaler for what is missing."""
        self._fleet.tick()
        self.turns.tick()
        nodes = {node.node_id: node for node in self._fleet.nodes}
        for node_id in self._slots.keys() - nodes.keys():
            del self._slots[node_id]
            self.turns.release(node_id)
        for node_id in nodes.keys() - self._slots.keys():  # a node that did not answer for a while still runs its tasks
            self._slots[node_id] = slot = Slot(node=nodes[node_id])
            for task in self._under_way.values():
                if task.node and task.node.node_id == node_id:
                    (slot.begins if task.recipe else slot.begins_judge)(task.device_class)
        self._tell_held()
        self._fleet.ask(self._asks())

    def judges(self, may_start: Callable[[_Task], bool]) -> Iterator[tuple[Slot, _Task]]:
        """Yield the judges to start now, each with its slot, and begin and end turns."""
        for slot in self._slots.values():
            ready, waiting, node_id = self._ready.num_for(slot.node), self._waiting.num_for(slot.node), slot.node.node_id
            if ends_turn(slot, ready=ready, waiting=waiting, others=self.turns.others):
                self._end_turn(slot)
            if begins_turn(slot, self._slots.values(), ready=ready, waiting=waiting, now=time.monotonic()):
                slot.turn = True
            if not slot.turn or slot.judge or slot.builds:
                continue
            task = self._ready.take(slot, self._fleet.nodes)
            if task is None:
                self._end_turn(slot)
            elif not may_start(task):
                self._ready.appendleft(task)
                if slot.num_judged and self.turns.others:  # one of them may wait for this node
                    self._end_turn(slot)
            else:
                if not slot.num_judged:
                    self.turns.claim(node_id)
                yield slot, task

    def builds(self, may_start: Callable[[_Task], bool]) -> Iterator[tuple[Slot, _Task]]:
        """Yield the builds to start now, one for each building node in turn."""
        num_cpus = sum(slot.node.num_cpus for slot in self._slots.values())
        open_ = [slot for slot in self._slots.values() if not self.turns.claimed(slot.node.node_id)]
        while open_:
            for slot in by_load(open_):
                waiting = self._waiting.num_for(slot.node)
                task = self._waiting.take(slot, self._fleet.nodes) if slot.has_room(waiting, num_cpus) else None
                if task is not None and may_start(task):
                    yield slot, task
                    continue
                if task is not None:
                    self._waiting.appendleft(task)
                open_.remove(slot)

    def enter(self, task: _Task, slot: Slot) -> None:
        """Record that a task was started in a slot."""
        (slot.begins if task.recipe else slot.begins_judge)(task.device_class)
        task.node = slot.node
        self._under_way[id(task)] = task

    def leave(self, task: _Task, done: Done) -> None:
        """Record that a task ended or was lost."""
        self._under_way.pop(id(task), None)
        slot = self._slots.get(task.node.node_id) if task.node else None
        if slot is not None:
            slot.ends(task.device_class, judge=task.recipe is None)
        if done.lost and task.node:
            self._fleet.doubt(task.node)

    def check_again(self) -> None:
        """Check soon whether each waiting task has a node, since the needs of one changed."""
        self._check_again = True

    def judges_here(self) -> bool:
        """Whether a judge runs on the driver's node, or another campaign has its turn there."""
        home = self._fleet.cluster.home
        here = self._slots.get(home) if self._slots else None
        return here is not None and (here.judge or self.turns.claimed(home))

    def given_up(self) -> list[_GivenUp[_Task]]:
        """Remove and return the tasks that no node can serve: without enough memory at once, without a node after some time."""
        nodes, now = self._fleet.nodes, time.monotonic()
        if nodes == self._checked_for and (not (self._unserved or self._check_again) or now < self._next_check):
            return []
        self._checked_for, self._next_check = nodes, now + CHECK_S
        gone: list[_GivenUp[_Task]] = []
        without: dict[str, float] = {}
        self._unserved = _unserved((*self._waiting, *self._ready, *self._under_way.values()), nodes)
        for task in (*self._waiting, *self._ready):
            too_large, name = missing(task, nodes), task.device_class
            if too_large is not None:
                gone.append((task, Failure(kind="memory", code=CODES["memory"], message=too_large)))
            elif not any(serves(task, node) for node in nodes):
                without[name] = since = self._without_node.get(name, now)
                if now - since >= self._fleet.patience_s:
                    why = f"no node serves {name} with {task.least_cpus} CPUs, for {now - since:.0f} s; start one, and run again"
                    gone.append((task, Failure(kind="infrastructure", code="CP-NO-NODE", message=why)))
        for name in without.keys() - self._without_node.keys():
            self._show(Event(kind="note", text=f"no node serves {name} now; waiting up to {self._fleet.patience_s:g} s for one"))
        self._without_node = without
        self._waiting.remove(task for task, *_ in gone)
        self._ready.remove(task for task, *_ in gone)
        self._check_again = bool(gone)  # the judge of the item may have no node either
        return gone

    def close(self) -> None:
        """End all turns."""
        self.turns.close()

    def _end_turn(self, slot: Slot) -> None:
        slot.turn, slot.num_judged = False, 0
        slot.rests_until = time.monotonic() + (REST_S if self.turns.others else 0)
        self.turns.release(slot.node.node_id)

    def _tell_held(self) -> None:
        """Report each judge that waits because something else runs on its node, once."""
        now = time.monotonic()
        if now < self._next_held:
            return
        self._next_held = now + BEGUN_S
        for slot in self._slots.values():
            if not slot.judge or slot.held_looks > 1 or now < slot.judge_since + BEGUN_S:
                continue
            held = self._fleet.cluster.held(slot.node)
            slot.held_looks = slot.held_looks + 1 if held else 0
            if slot.held_looks > 1:
                what = f"judge waits for node {slot.node.node_id[:12]}: {held}"
                self._show(Event(kind="note", text=f"{what}; it starts when nothing else runs there"))

    def _asks(self) -> Counter[Ask]:
        """Return what to ask an autoscaler for: a node for each class that has none for its largest task, and for other classes
        nodes for the waiting tasks, up to a doubling of the cores.
        """
        asked = Counter(ask for ask in self._unserved.values() if not any(_covers(other, ask) for other in self._unserved.values()))
        for name in self._waiting.counts().keys() | self._ready.counts().keys():
            num_cpus = MAX_ASKED * sum(slot.node.num_cpus for slot in self._slots.values() if name in slot.node.classes)
            for task in chain(self._waiting.line(name), self._ready.line(name)) if name not in self._unserved else ():
                num_cpus -= task.least_cpus
                if num_cpus < 0:
                    break
                asked[_ask_of(task, task.least_cpus)] += 1
        return asked


def _ask_of(task: Work, num_cpus: int) -> Ask:
    """Return what to ask for a task. A memory estimate is not part of it, since a task runs with less if no node has as much."""
    least = task.demand.least
    return Ask(device_class=task.device_class, num_cpus=num_cpus, memory_bytes=least if least > BASE_BYTES else None)


def _unserved(tasks: Iterable[Work], nodes: Collection[Node]) -> dict[str, Ask]:
    """Return, by class, the needs of the largest task that no node can serve, or whose judge no node can."""
    largest: dict[str, Ask] = {}
    for task in tasks:
        if not any(serves(task, node) and node.num_cpus >= task.judge_cpus for node in nodes):
            ask = _ask_of(task, task.judge_cpus)
            largest[ask.device_class] = max(ask, largest.get(ask.device_class, ask), key=_size)
    return largest


def _size(ask: Ask) -> tuple[int, int]:
    """Sort key."""
    return ask.num_cpus, ask.memory_bytes or 0


def _covers(other: Ask, ask: Ask) -> bool:
    """Whether a node for another request also serves this portable one."""
    return ask.device_class == PORTABLE != other.device_class and _size(other) >= _size(ask)
