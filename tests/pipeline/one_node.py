"""A fleet of one node without Ray, and a task that waits for a node."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pipeline.cluster.nodes import Node
from pipeline.cluster.ray_cluster import Cluster
from pipeline.planning.memory_estimate import Demand
from pipeline.scheduling.fleet import Fleet
from tests.steps import HERE

NODE = Node(node_id="n1", num_cpus=2, classes=(HERE, "portable"))


DEMAND = Demand(asked=2 * 10**9, least=0)


@dataclass
class Waiting:
    """A build, or a judge if `recipe` is None, that waits for a node."""

    device_class: str
    index: int = 0
    recipe: str | None = None
    judge_cpus: int = 1
    node: Node | None = None
    avoid: set[str] = field(default_factory=set)
    demand: Demand = DEMAND

    @property
    def least_cpus(self) -> int:
        return 1 if self.recipe else self.judge_cpus


class NoRay(Cluster):
    """Base of clusters that run tasks without Ray; the driver is on a machine of its own."""

    def __init__(self) -> None:
        self.joined, self.home = False, "elsewhere"


class OneNode(Fleet):
    """Nodes that need no check, and stay; one by default."""

    def __init__(self, cluster: Cluster, store: Path, *nodes: Node) -> None:
        super().__init__(cluster, lambda _: None, store=store, files=store, wait_s=None)
        self.have(*(nodes or (NODE,)))

    def have(self, *nodes: Node) -> None:
        self._used = {node.node_id: node for node in nodes}

    def tick(self) -> None:
        """Nothing changes."""
