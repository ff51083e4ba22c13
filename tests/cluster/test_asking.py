"""What Ray's autoscaler sees of what a fleet asks for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.autoscaler.v2.sdk import get_cluster_resource_state

from pipeline.cluster.autoscaling import Ask
from pipeline.cluster.connect import connect
from pipeline.scheduling.fleet import Fleet
from tests.raylets import RayCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

V3, V4 = "cpu-x86-64-v3", "cpu-x86-64-v4"
APPEARS_S = 30.0

Demanded = list[tuple[dict[str, float], dict[str, list[str]], int]]


def demanded(address: str) -> Demanded:
    """Resources, labels and count of each kind of task that waits for a node."""
    found = []
    for demand in get_cluster_resource_state(GcsClient(address)).pending_resource_requests:
        labels = {
            constraint.label_key: list(constraint.label_values)
            for selector in demand.request.label_selectors
            for constraint in selector.label_constraints
        }
        found.append((dict(demand.request.resources_bundle), labels, demand.count))
    return sorted(found, key=lambda item: item[0]["CPU"])


def demanded_at_last(address: str, expected: Demanded) -> None:
    deadline = time.monotonic() + APPEARS_S
    while demanded(address) != expected and time.monotonic() < deadline:
        time.sleep(0.5)
    assert demanded(address) == expected


def test_the_autoscaler_sees_the_label_the_cores_and_the_memory_while_they_are_asked_for(
    private_cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "RAY_AUTH_MODE"):
        monkeypatch.setenv(name, private_cluster.environment[name])
    private_cluster.start(num_cpus=1, classes=[V3])
    wide, core = Ask(device_class=V4, num_cpus=8, memory_bytes=3 * 10**9), Ask(device_class=V4)
    label = {f"coldpress.dev/{V4}": ["true"]}
    with connect(private_cluster.address) as cluster:
        fleet = Fleet(cluster, lambda _: None, store=tmp_path, files=tmp_path, wait_s=60)
        fleet.ask({wide: 2, core: 3})
        cores, judges = ({"CPU": 1.0}, label, 3), ({"CPU": 8.0, "memory": 3e9}, label, 2)
        demanded_at_last(private_cluster.address, [cores, judges])
        fleet.ask({wide: 2})
        demanded_at_last(private_cluster.address, [judges])
        fleet.ask({Ask(device_class=V3): 1})
        demanded_at_last(private_cluster.address, [])
