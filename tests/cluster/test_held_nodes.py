"""Nodes whose cores somebody else's actor holds when a campaign starts: said, left out, waited for, and named in the end."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from freezer.errors import InfrastructureError
from pipeline.cluster.connect import connect
from pipeline.cluster.nodes import Node
from pipeline.cluster.ray_cluster import Cluster
from pipeline.records.events import Event
from pipeline.scheduling.fleet import Fleet, assembled
from tests.cluster.conftest import V3, V4
from tests.raylets import RayCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@contextmanager
def held(node: Node, num_cpus: int | None = None) -> Iterator[None]:
    """Every core of a node, or some, by somebody's actor, until the end."""

    class Squatter:  # travels by value: a node does not have this module
        def here(self) -> bool:
            return True

    on_node = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    actor = ray.remote(Squatter).options(num_cpus=num_cpus or node.num_cpus, scheduling_strategy=on_node).remote()
    ray.get(actor.here.remote())
    try:
        yield
    finally:
        ray.kill(actor)


@pytest.fixture
def joined(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    for name in ("HOME", "RAY_AUTH_MODE"):
        monkeypatch.setenv(name, cluster.environment[name])
    monkeypatch.setattr("pipeline.scheduling.node_check.SOON_S", 1.0)
    monkeypatch.setattr("pipeline.scheduling.fleet.REFRESH_S", 0.2)
    with connect(cluster.address) as found:
        yield found


def fleet_of(cluster: Cluster, folder: Path) -> tuple[Fleet, list[str]]:
    notes: list[str] = []

    def show(event: Event) -> None:
        notes.append(event.text)

    return Fleet(cluster, show, store=folder, files=folder, wait_s=None), notes


def test_a_node_that_is_held_is_left_out_and_used_when_it_is_free(
    joined: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.scheduling.node_check.LATE_S", 3.0)
    fleet, notes = fleet_of(joined, tmp_path)
    small = next(node for node in joined.nodes() if V3 in node.classes)
    with held(small):
        fleet.assemble({V4})
        assert [node.classes for node in fleet.nodes] == [(V4, "portable")]
        who = rf"node {small.node_id[:12]}, which serves {V3}, portable: in use are 1 of its 1 CPUs; actors there: Squatter"
        assert [note for note in notes if re.fullmatch(f"waiting for {who}", note)], notes
        assert re.fullmatch(f"begun without {who}; it is used when it answers", notes[-1]), notes
        fleet.tick()
        assert len(fleet.nodes) == 1
    deadline = time.monotonic() + 60
    while len(fleet.nodes) < 2 and time.monotonic() < deadline:
        fleet.tick()
        time.sleep(0.2)
    fleet.close()
    assert {node.classes for node in fleet.nodes} == {(V4, "portable"), (V3, "portable")}, notes
    assert notes[-1] == f"node {small.node_id[:12]} joined, for {V3}, portable"


def test_the_only_node_of_a_class_is_waited_for_and_named_in_the_end(
    joined: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.scheduling.node_check.LATE_S", 1.0)
    monkeypatch.setattr("pipeline.scheduling.node_check.HELD_S", 15.0)
    fleet, _ = fleet_of(joined, tmp_path)
    small = next(node for node in joined.nodes() if V3 in node.classes)
    with held(small), pytest.raises(InfrastructureError) as caught, assembled(fleet, {V3, V4}):
        pass
    assert caught.value.code == "CP-NO-NODE"
    assert re.match(
        rf"no node for {V3} has given a core or GPU for \d+ s: node {small.node_id[:12]}, which serves {V3}, portable: in use are "
        r"1 of its 1 CPUs; actors there: Squatter\. End what holds it, start another node for cpu-x86-64-v3, or leave ",
        str(caught.value),
    )


def test_the_only_node_of_a_class_is_used_when_it_is_freed_in_time(
    joined: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.scheduling.node_check.LATE_S", 1.0)
    small = next(node for node in joined.nodes() if V3 in node.classes)
    with ExitStack() as holding:
        holding.enter_context(held(small))

        def free(event: Event) -> None:
            if event.text.startswith("waiting for"):
                holding.close()

        with assembled(Fleet(joined, free, store=tmp_path, files=tmp_path, wait_s=None), {V3}) as fleet:
            assert {node.classes for node in fleet.nodes} == {(V4, "portable"), (V3, "portable")}


def test_a_judge_that_has_not_begun_is_told_from_one_that_has(joined: Cluster, tmp_path: Path) -> None:
    large = next(node for node in joined.nodes() if V4 in node.classes)
    begun = tmp_path / "begun"

    def judge(path: Path, seconds: float) -> None:
        path.touch()
        time.sleep(seconds)

    def what_holds_it() -> set[str | None]:
        found = set()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            found.add(joined.held(large))
            time.sleep(0.5)
        return found

    with held(large, num_cpus=1):
        handle = joined.start_alone(judge, begun, 20.0, name="judge", device_class_=V4, node=large)
        assert what_holds_it() == {"in use are 1 of its 2 CPUs; actors there: Squatter"}
        assert not begun.exists()
    deadline = time.monotonic() + 60
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    assert what_holds_it() == {None}
    joined.cancel([handle])
