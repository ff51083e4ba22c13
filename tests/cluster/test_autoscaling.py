"""A campaign on a cluster whose nodes Ray's autoscaler starts and ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import V3, V4, write_slow_catalog
from tests.support.campaign_runs import outcomes
from tests.support.raylets import RayCluster, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

HEAD = "ray.head.default"
OF_HEAD = {
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_CLOUD_INSTANCE_ID": f"{0:056x}".replace("0" * 51, "f" * 51),
    "RAY_NODE_TYPE_NAME": HEAD,
}
"""The environment of a head whose autoscaler starts nodes on this machine."""

PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
"""Named, since the wheel of Ray 2.60 lacks the defaults of its type."""

STAGES = ("initialization", "setup", "head_setup", "worker_setup")
NODES = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
print(len(ray.nodes()), sum(node["Alive"] for node in ray.nodes()))
"""
"""Prints how many nodes there ever were, and how many live."""


def write_settings(path: Path, address: str) -> Path:
    """Write a file for `ray start --autoscaling-config`, with a type of node for v4."""
    node = {"resources": {"CPU": 1}, "labels": {f"coldpress.dev/{V4}": "true"}, "max_workers": 2}
    head = {"resources": {}, "max_workers": 0}
    commands = [*STAGES, "head_start_ray", "worker_start_ray"]
    settings = {
        "cluster_name": "local",
        "max_workers": 2,
        "idle_timeout_minutes": 0.25,
        "provider": {"type": "external", "module": PROVIDER, "gcs_address": address},
        "auth": {},
        "file_mounts": {},
        **{f"{name}_commands": [] for name in commands},
        "cluster_synced_files": [],
        "head_node_type": HEAD,
        "available_node_types": {
            HEAD: {**head, "node_config": {}},
            "v4": {**node, "node_config": {}},
        },
    }
    path.write_text(json.dumps(settings))
    return path


def test_machines_are_started_for_a_campaign_and_ended(
    private_cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Or else drivers put this machine's own address in place of the loopback's.
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

    def nodes() -> list[str]:
        """How many there ever were, and how many live."""
        address = private_cluster.address
        return private_cluster.run([sys.executable, "-c", NODES, address]).stdout.split()

    models = tmp_path / "models"
    write_slow_catalog(models, "abcd", seconds=2.0)
    file = write_settings(tmp_path / "autoscaler.json", private_cluster.address)
    private_cluster.start(
        num_cpus=1, classes=[V3], environ=OF_HEAD, options=[f"--autoscaling-config={file}"]
    )
    command = [sys.executable, "-m", "jobs.optimize", str(models / "catalog.yaml")]
    command += ["--device-class", V4, "--address", private_cluster.address]
    command += ["--store", str(models / "store"), "--tracking-uri", f"sqlite:///{models}/mlflow.db"]
    command += ["--json", str(models / "out.json")]
    refused = private_cluster.run(command)
    assert refused.returncode == 3, refused.stdout
    assert nodes() == ["1", "1"], (
        "a campaign does not wait for nodes unless --wait-for-nodes is given"
    )
    done = private_cluster.run([*command, "--wait-for-nodes"], timeout_s=500)
    assert done.returncode == 0, done.stdout
    found = outcomes(models)
    assert set(found) == {(name, at) for name in "abcd" for at in (V4, "portable")}
    assert "failed" not in {outcome["verdict"] for outcome in found.values()}
    assert {outcome["num_threads"] for outcome in found.values()} == {1}
    wait_until(lambda: nodes() == ["3", "1"], "two nodes were started, and ended", 120)
