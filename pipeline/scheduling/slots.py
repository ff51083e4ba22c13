"""Slots: where on a node a task may run, and how many may run there."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from freezer.hardware.device_classes import device_class
from pipeline.cluster.nodes import Node

JUDGE_BATCH = 16
"""Judges of one turn; and items for which a further node takes a turn."""

QUEUE_PER_CPU = 2
"""Builds in flight for each core: enough that no worker waits for the driver."""


@dataclass(kw_only=True)
class Slot:
    """A node as the driver fills it.

    Attributes:
        builds: in flight, whether they run or wait for a core; `gpu_builds` are those of them that take a GPU.
        judge: whether one is in flight.
        turn: whether it is its turn to judge: no build is given to it.
        num_judged: judges of this turn, that in flight counted.
        judge_since, held_looks: when the judge in flight was given to it, in seconds, and how often it was found not to have begun.
        last_class: of the last task it was given.
        rests_until: before then no turn begins.
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
        """Whether it may be given a build; when few wait, no more than it has cores: the last ones should not queue."""
        depth = QUEUE_PER_CPU if num_waiting > num_cpus else 1
        return not self.turn and not self.judge and self.builds < depth * self.node.num_cpus

    def begins(self, name: str) -> None:
        """A build of a class is under way here."""
        self.builds += 1
        self.gpu_builds += takes_gpu(name)
        self.last_class = name

    def begins_judge(self, name: str) -> None:
        """A judge of a class is under way here."""
        self.judge = self.turn = True
        self.judge_since, self.held_looks = time.monotonic(), 0
        self.num_judged += 1
        self.last_class = name

    def ends(self, name: str, *, judge: bool) -> None:
        """What was under way has ended."""
        if judge:
            self.judge = False
        else:
            self.builds -= 1
            self.gpu_builds -= takes_gpu(name)

    def takes(self, name: str) -> bool:
        """Whether it may be given another task of a class, as far as GPUs go."""
        return not takes_gpu(name) or self.gpu_builds < QUEUE_PER_CPU * self.node.num_gpus


def takes_gpu(name: str) -> bool:
    """Whether tasks of a device class need a GPU."""
    return device_class(name).kind == "cuda"


def begins_turn(slot: Slot, slots: Collection[Slot], *, ready: int, waiting: int, now: float) -> bool:
    """Whether a node that builds should judge now.

    Args:
        slot: of the node.
        slots: of all nodes.
        ready, waiting: items that wait for a judge, and builds that wait, of classes that the node serves.
        now: time, as `rests_until` has it.
    """
    if slot.turn or not ready or now < slot.rests_until:
        return False
    taken = JUDGE_BATCH * sum(other.turn and bool(set(other.node.classes) & set(slot.node.classes)) for other in slots)
    return not waiting or ready - taken >= JUDGE_BATCH


def ends_turn(slot: Slot, *, ready: int, waiting: int, others: bool) -> bool:
    """Whether a node that judges should build again, or be left to other campaigns; never while a judge runs.

    Args:
        slot: of the node.
        ready, waiting: as of `begins_turn`.
        others: whether other campaigns run on the cluster.
    """
    return slot.turn and not slot.judge and (not ready or (slot.num_judged >= JUDGE_BATCH and (waiting > 0 or others)))


def by_load(slots: Iterable[Slot]) -> list[Slot]:
    """The slots, the least loaded first."""
    return sorted(slots, key=lambda slot: slot.builds / slot.node.num_cpus)
