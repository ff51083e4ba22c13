"""Slots: how many tasks a node may run, and when it builds or judges."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from freezer.hardware.device_classes import device_class
from pipeline.cluster.nodes import Node

JUDGE_BATCH = 16
"""Judges in one turn, and items that wait before another node takes a turn."""

QUEUE_PER_CPU = 2
"""Builds in flight for each core, so that no worker waits for the driver."""


@dataclass(kw_only=True)
class Slot:
    """The tasks that the driver gave to a node.

    Attributes:
        builds: in flight, running or waiting for a core; `gpu_builds` of them take a GPU.
        judge: whether one is in flight.
        turn: whether it is the node's turn to judge; it then gets no builds.
        num_judged: judges of this turn, including the one in flight.
        judge_since, held_looks: when the judge in flight was submitted, in seconds, and how many checks found it not running.
        last_class: of the last task.
        rests_until: when the next turn may begin.
    """

    node: Node
    builds: int = 0
    gpu_builds: int = 0
    judge: bool = False
    turn: bool = False
    num_judged: int = 0
    judge_since: float = 0.0
    held_looks: int = 0
    last_class: str = ""
    rests_until: float = 0.0

    def has_room(self, num_waiting: int, num_cpus: int) -> bool:
        """Whether the node may get a build. When few wait, it gets one per core, so that the last builds do not queue."""
        depth = QUEUE_PER_CPU if num_waiting > num_cpus else 1
        return not self.turn and not self.judge and self.builds < depth * self.node.num_cpus

    def begins(self, name: str) -> None:
        """Record that a build of a class was submitted."""
        self.builds += 1
        self.gpu_builds += takes_gpu(name)
        self.last_class = name

    def begins_judge(self, name: str) -> None:
        """Record that a judge of a class was submitted."""
        self.judge = self.turn = True
        self.judge_since, self.held_looks = time.monotonic(), 0
        self.num_judged += 1
        self.last_class = name

    def ends(self, name: str, *, judge: bool) -> None:
        """Record that a build or judge ended."""
        if judge:
            self.judge = False
        else:
            self.builds -= 1
            self.gpu_builds -= takes_gpu(name)

    def takes(self, name: str) -> bool:
        """Whether the GPUs allow another task of a class."""
        return not takes_gpu(name) or self.gpu_builds < QUEUE_PER_CPU * self.node.num_gpus


def takes_gpu(name: str) -> bool:
    """Whether tasks of a device class need a GPU."""
    return device_class(name).kind == "cuda"


def begins_turn(slot: Slot, slots: Collection[Slot], *, ready: int, waiting: int, now: float) -> bool:
    """Whether a building node should judge now.

    Args:
        slot: of the node.
        slots: of all nodes.
        ready, waiting: judges and builds that wait, of classes that the node serves.
        now: monotonic time, in seconds.
    """
    if slot.turn or not ready or now < slot.rests_until:
        return False
    taken = JUDGE_BATCH * sum(other.turn and bool(set(other.node.classes) & set(slot.node.classes)) for other in slots)
    return not waiting or ready - taken >= JUDGE_BATCH


def ends_turn(slot: Slot, *, ready: int, waiting: int, others: bool) -> bool:
    """Whether a judging node should build again, or be left to other campaigns; never while a judge runs.

    Args:
        slot: of the node.
        ready, waiting: as in `begins_turn`.
        others: whether other campaigns run on the cluster.
    """
    return slot.turn and not slot.judge and (not ready or (slot.num_judged >= JUDGE_BATCH and (waiting > 0 or others)))


def by_load(slots: Iterable[Slot]) -> list[Slot]:
    """Return the slots, least loaded first."""
    return sorted(slots, key=lambda slot: slot.builds / slot.node.num_cpus)
