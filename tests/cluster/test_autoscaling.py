"""Ray's autoscaler: what it sees of a fleet's demand, and a campaign whose nodes it starts and ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.autoscaler.v2.sdk import get_cluster_resource_state

from pipeline.cluster.autoscaling import Ask
from pipeline.cluster.ray_cluster import Cluster
from pipeline.scheduling.fleet import Fleet
from tests.cluster.conftest import V3, V4, write_slow_catalog
from tests.cluster.local_machines import HEAD, identity, write_settings
from tests.raylets import RayCluster, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ZEN4 = "cpu-zen4"

Demand = tuple[dict[str, float], dict[str, list[str]], int]


def demand(address: str) -> list[Demand]:
    """Resources, labels and count of each kind of task that waits for a node."""
    found = []
    for pending in get_cluster_resource_state(GcsClient(address)).pending_resource_requests:
        labels = {
            constraint.label_key: list(constraint.label_values)
            for selector in pending.request.label_selectors
            for constraint in selector.label_constraints
        }
        found.append((dict(pending.request.resources_bundle), labels, pending.count))
    return sorted(found, key=lambda item: item[0]["CPU"])


def test_the_autoscaler_sees_labels_cores_and_memory(joined: Cluster, cluster: RayCluster, tmp_path: Path) -> None:
    fleet = Fleet(joined, lambda _: None, store=tmp_path, files=tmp_path, wait_s=60)

    def check_demand(asked: dict[Ask, int], *expected: Demand) -> None:
        fleet.ask(asked)
        wait_until(lambda: demand(cluster.address) == list(expected), f"a demand of {expected}")

    wide, core = Ask(device_class=ZEN4, num_cpus=8, memory_bytes=3 * 10**9), Ask(device_class=ZEN4)
    label = {f"coldpress.dev/{ZEN4}": ["true"]}
    check_demand({wide: 2, core: 3}, ({"CPU": 1.0}, label, 3), ({"CPU": 8.0, "memory": 3e9}, label, 2))
    check_demand({wide: 2}, ({"CPU": 8.0, "memory": 3e9}, label, 2))
    check_demand({Ask(device_class=V3): 1})


def machines(folder: Path) -> set[str]:
    """The machines that were ever started."""
    return {path.stem for path in folder.glob("machine-*.log")}


def running(names: set[str]) -> set[str]:
    """Those of some machines whose raylet runs."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.name() == "raylet":
                found.add(process.environ().get("RAY_CLOUD_INSTANCE_ID", ""))
        except psutil.Error:
            continue
    return found & names


def test_machines_are_started_for_a_campaign_and_ended(private_cluster: RayCluster, tmp_path: Path) -> None:
    models = tmp_path / "models"
    write_slow_catalog(models, "abcd", seconds=2.0)
    types = {"v4": {"resources": {"CPU": 1}, "labels": {f"coldpress.dev/{V4}": "true"}, "max_workers": 2}}
    file = write_settings(tmp_path, private_cluster.address, types, idle_minutes=0.25)
    private_cluster.start(
        num_cpus=1,
        classes=[V3],
        environ={**identity(HEAD, HEAD), "RAY_enable_autoscaler_v2": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"},
        options=[f"--autoscaling-config={file}"],
    )
    command = [sys.executable, "-m", "jobs.optimize", str(models / "catalog.yaml"), "--device-class", V4]
    command += ["--store", str(models / "store"), "--tracking-uri", f"sqlite:///{models}/mlflow.db"]
    command += ["--address", private_cluster.address, "--json", str(models / "out.json")]
    refused = private_cluster.run(command)
    assert refused.returncode == 3, refused.stdout
    assert machines(tmp_path) == set(), "a campaign does not wait for nodes unless --wait-for-nodes is given"
    done = private_cluster.run([*command, "--wait-for-nodes", "--wait-limit", "200"], timeout_s=500)
    assert done.returncode == 0, done.stdout
    assert f"coldpress.dev/{V4}=true" in done.stdout
    outcomes = json.loads((models / "out.json").read_text())["outcomes"]
    found = {(item["model"], item["device_class"]) for item in outcomes if item["verdict"] != "failed"}
    assert found == {(name, at) for name in "abcd" for at in (V4, "portable")}
    assert {item["num_threads"] for item in outcomes} == {1}
    assert machines(tmp_path) == {"machine-0", "machine-1"}, done.stdout
    wait_until(lambda: not running({"machine-0", "machine-1"}), "idle machines end", 120)
