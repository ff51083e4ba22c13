"""A fleet of one node, which nobody need examine and which stays, and a cluster that is no Ray."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pipeline.cluster.nodes import Node
from pipeline.cluster.ray_cluster import Cluster
from pipeline.scheduling.fleet import Fleet
from tests.steps import HERE

NODE = Node(node_id="n1", num_cpus=2, classes=(HERE, "portable"))


class NoRay(Cluster):
    """The base of what takes tasks in place of a Ray: the driver stands elsewhere, alone."""

    def __init__(self) -> None:
        self.joined, self.home = False, "elsewhere"


class OneNode(Fleet):
    """The one node, on which a cluster starts everything."""

    def __init__(self, cluster: Cluster, store: Path, node: Node = NODE) -> None:
        super().__init__(cluster, lambda _: None, store=store, files=store, wait_s=None)
        self._used = {node.node_id: node}

    def tick(self) -> None:
        """Nothing changes."""

    def assemble(self, wanted: Collection[str]) -> None:
        """It is there."""
