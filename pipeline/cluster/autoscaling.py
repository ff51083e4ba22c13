"""Requests to an autoscaler, made with tasks that do nothing and wait for a node.

Ray's `request_resources` takes label selectors too, but is worse here: a cluster has a single request, which every campaign would
overwrite, and which outlives its driver and keeps the nodes running. Tasks end with their driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.cluster.nodes import Handle
from pipeline.cluster.ray_cluster import Cluster

MAX_ASKED = 2
"""Cores to request for each core that a class has, so a fleet grows by doubling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Resources of one waiting task, as requested from an autoscaler; no memory if any node has enough."""

    device_class: str
    num_cpus: int = 1
    memory_bytes: int | None = None


class Asking:
    """The tasks that request nodes on a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._asked: dict[Ask, list[Handle]] = {}

    def ask(self, wanted: Mapping[Ask, int]) -> None:
        """Request these resources instead of the previous ones.

        Args:
            wanted: count of each. All tasks of an unwanted kind are cancelled; single ones are not, since Ray requests nodes as
                long as any task of a kind waits.
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
    """The task that waits for a node."""
