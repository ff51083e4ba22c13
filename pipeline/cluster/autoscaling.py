"""Asking: an autoscaler is asked for nodes by tasks that do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.cluster.nodes import Handle
from pipeline.cluster.ray_cluster import Cluster

MAX_ASKED = 2
"""Cores to ask an autoscaler for, for each that a class has; so a fleet grows by doubling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What one task that waits needs of a node, as an autoscaler is asked for it.

    Attributes:
        memory_bytes: None where any node has enough.
    """

    device_class: str
    num_cpus: int = 1
    memory_bytes: int | None = None


class Asking:
    """The tasks that an autoscaler is asked by.

    Args:
        cluster: they wait there until a node has what they ask.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._asked: dict[Ask, list[Handle]] = {}

    def ask(self, wanted: Mapping[Ask, int]) -> None:
        """Ask for this, and no more for what was asked before.

        Args:
            wanted: how many of each. What nothing wants any more is taken back; single ones are not, since Ray would go on asking
                while any of a kind waits.
        """
        waiting = [handle for handles in self._asked.values() for handle in handles]
        ended = {done.handle for done in self._cluster.wait(waiting, timeout_s=0)} if waiting else set()
        for ask in {*wanted, *self._asked}:
            count, pending = wanted.get(ask, 0), [handle for handle in self._asked.pop(ask, []) if handle not in ended]
            if count:
                self._asked[ask] = [*pending, *(self._start(ask) for _ in range(count - len(pending)))]
            else:
                self._cluster.cancel(pending, grace_s=1)

    def _start(self, ask: Ask) -> Handle:
        name = ask.device_class
        return self._cluster.start(
            _nothing, name=f"ask {name}", device_class_=name, num_cpus=ask.num_cpus, memory_bytes=ask.memory_bytes
        )


def _nothing() -> None:
    """What an autoscaler is asked for a node for."""
