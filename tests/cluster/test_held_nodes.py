"""Nodes whose cores another actor holds when a campaign starts: reported, left out, and named if no
other node serves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from freezer.errors import InfrastructureError
from pipeline.cluster import Cluster, Node
from pipeline.scheduling import Fleet, SharedFiles
from tests.cluster.conftest import V3, V4
from tests.support.raylets import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@contextmanager
def held(node: Node) -> Iterator[None]:
    """Hold all cores of a node with an actor."""

    class Squatter:  # pickled by value: nodes do not have this module
        def here(self) -> bool:
            return True

    on_node = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    actor = (
        ray.remote(Squatter).options(num_cpus=node.num_cpus, scheduling_strategy=on_node).remote()
    )
    ray.get(actor.here.remote())
    try:
        yield
    finally:
        ray.kill(actor)


def node_of(cluster: Cluster, device_class: str) -> Node:
    return next(node for node in cluster.nodes() if device_class in node.classes)


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def fleet(
    joined: Cluster, tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> Fleet:
    monkeypatch.setattr("pipeline.scheduling.node_check.SOON_S", 1.0)
    monkeypatch.setattr("pipeline.scheduling.node_check.LATE_S", 3.0)
    monkeypatch.setattr("pipeline.scheduling.fleet.REFRESH_S", 0.2)
    shared = SharedFiles(store=tmp_path, files=tmp_path)
    return Fleet(joined, lambda event: notes.append(event.text), shared, wait_s=None)


def test_a_held_node_is_used_once_it_is_free(
    joined: Cluster, fleet: Fleet, notes: list[str]
) -> None:
    small = node_of(joined, V3)

    def both_used() -> bool:
        fleet.tick()
        return len(fleet.nodes) == 2

    with ExitStack() as assembled:
        with held(small):
            assembled.enter_context(fleet.assembled({V4}))
            assert [node.classes for node in fleet.nodes] == [(V4, "portable")]
            assert any(f"starting without node {small.node_id[:12]}" in note for note in notes)
            assert not both_used()
        wait_until(both_used, "the node is used")
    assert {node.classes for node in fleet.nodes} == {(V4, "portable"), ("portable",)}, notes


def test_a_class_names_its_only_node_if_held(
    joined: Cluster, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.scheduling.node_check.ONLY_NODE_S", 15.0)
    small = node_of(joined, V3)
    with (
        held(small),
        pytest.raises(InfrastructureError) as caught,
        fleet.assembled({V3, V4}),
    ):
        pass
    assert caught.value.code == "CP-NO-NODE"
    assert re.search(rf"node {small.node_id[:12]}, .*{V3}, portable", str(caught.value))
