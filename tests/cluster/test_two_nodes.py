"""Campaigns on two unlike nodes: tasks are placed by class, and nodes come and go."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import V3, V4, watched, write_slow_catalog
from tests.support.campaign_runs import outcomes
from tests.support.fault_sites import Driver
from tests.support.raylets import RayCluster
from tests.support.watched import intervals

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NODES = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
for node in sorted(ray.nodes(), key=lambda node: "node:__internal_head__" not in node["Resources"]):
    print(node["NodeID"])
"""
"""Prints the ids of a cluster's nodes, the head's first."""


def test_two_campaigns_place_by_class(private_cluster: RayCluster, tmp_path: Path) -> None:
    private_cluster.start(num_cpus=2, classes=[V4])
    private_cluster.start(num_cpus=1, classes=[V3])
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, name in ((first, "a"), (second, "b")):
        write_slow_catalog(folder, name, seconds=0.0)
    commands = [watched(first), watched(second, f"device_classes={V4}")]
    for driver in [Driver(private_cluster.popen(command)) for command in commands]:
        assert driver.end() == 0, driver.output
    found = intervals(first / "first", second / "second")
    kinds = sorted(task.kind for task in found if task.what.endswith((V3, V4)))
    assert kinds == ["build"] * 3 + ["judge"] * 3  # `portable` runs within them, or beside
    nodes = {
        device_class: {task.node_id for task in found if task.what.endswith(device_class)}
        for device_class in (V3, V4)
    }
    assert len(nodes[V3]) == len(nodes[V4]) == 1
    assert nodes[V3] != nodes[V4]
    threads = {
        name: outcome["num_threads"] for (_, name), outcome in outcomes(first, first.name).items()
    }
    assert threads == {V3: 1, V4: 2, "portable": 1}


def test_a_drained_node_finishes_its_task(private_cluster: RayCluster, tmp_path: Path) -> None:
    """Nothing is repeated: the build that ran there is used, and later ones run on the
    other node.
    """
    folder = tmp_path / "drained"
    write_slow_catalog(folder, "abcd", seconds=4.0)
    private_cluster.start(num_cpus=1, classes=[V3])
    private_cluster.start(num_cpus=1, classes=[V3])
    driver = Driver(private_cluster.popen(watched(folder, f"device_classes={V3}")))
    driver.wait_for("build b")
    first, second = private_cluster.run(
        [sys.executable, "-c", NODES, private_cluster.address]
    ).stdout.split()
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "maintenance"]
    ray = str(Path(sys.executable).with_name("ray"))
    places = ["--address", private_cluster.address, "--node-id", second]
    drained = private_cluster.run([ray, "drain-node", *places, *reason])
    assert drained.returncode == 0, drained.stdout
    assert driver.end() == 0, driver.output
    assert f"node {second[:12]} left" in driver.output
    ran = intervals(folder / folder.name)
    assert {task.node_id for task in ran if task.kind == "judge"} == {first}
    assert second in {task.node_id for task in ran if task.kind == "build"}
    assert all(count == 1 for count in driver.built.values()), driver.built
