"""A driver on another machine (simulated by namespaces) must have joined the cluster."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from freezer.hardware import PORTABLE
from tests.support.campaign_runs import drive, outcomes, run, write_catalog
from tests.support.raylets import LOOPBACK, Network, RayCluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        not Network.allowed(), reason="needs the right to make namespaces, and iproute2"
    ),
]

APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Run a command in another process namespace."""

CATALOG = """
defaults: {recipes: [torchscript-frozen]}
models:
  - {name: good, source: "python:campaign_models:good", inputs: [{shape: [1, 16]}]}
"""

CONNECTS = (
    "import sys; from pipeline.cluster import client; client.connect(sys.argv[1]).__enter__()"
)
STANDS_ON = """
import ray
from pipeline.cluster.client import connect
with connect(None) as c:
    print(ray.get_runtime_context().get_node_id(), *(node.node_id for node in c.nodes()))
"""


def test_a_missing_raylet_is_detected_without_ray(tmp_path: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as head:
        address = f"{LOOPBACK}:{head.getsockname()[1]}"
        done = run([*APART, sys.executable, "-W", "ignore", "-c", CONNECTS, address], tmp_path)
    assert (
        f"InfrastructureError: no node of the Ray cluster at {address} runs on this machine"
        in done.stderr
    ), done.stderr


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(f"cp{os.getpid() % 100_000}", 1 + os.getpid() % 250) as found:
        yield found


@pytest.mark.slow
def test_a_node_without_cpus_can_drive(network: Network, tmp_path: Path) -> None:
    with RayCluster(tmp_path / "cluster") as cluster:
        cluster.ip = network.here
        cluster.start(num_cpus=2, classes=[PORTABLE])
        joined = cluster.start(num_cpus=0, network=network, before=APART)
        target = f"--target={joined.processes('raylet')[0].pid}"
        there = ["nsenter", target, "--pid", "--mount", "--net"]
        home, *workers = cluster.run([*there, sys.executable, "-c", STANDS_ON]).stdout.split()
        assert len(workers) == 1
        assert home not in workers
        write_catalog(tmp_path, CATALOG)
        done = cluster.run([*there, *drive(tmp_path), PORTABLE])
        assert done.returncode == 0, done.stdout
        assert outcomes(tmp_path)["good", PORTABLE]["verdict"] == "published"
        joined.kill()
