"""A driver on another machine (simulated by namespaces) must have joined the cluster."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from freezer.hardware import PORTABLE
from tests.support.campaign_runs import drive, outcomes, run, write_catalog
from tests.support.raylets import LOOPBACK, Network, RayCluster, free_port

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
from pipeline.cluster.client import connect
with connect(None) as c: print(c.home, *(node.node_id for node in c.nodes()))
"""


@dataclass(frozen=True)
class Site:
    """A cluster of one node, the port of its client server, and the network of another machine."""

    cluster: RayCluster
    network: Network
    port: int

    @property
    def there(self) -> list[str]:
        """Run a command on the other machine."""
        return ["ip", "netns", "exec", self.network.name, *APART]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with (
        Network(f"cp{os.getpid() % 100_000}", 1 + os.getpid() % 250) as network,
        RayCluster(tmp_path_factory.mktemp("cluster")) as cluster,
    ):
        cluster.ip = network.here
        port = free_port()
        cluster.start(num_cpus=2, classes=[PORTABLE], options=[f"--ray-client-server-port={port}"])
        yield Site(cluster, network, port)


def test_a_missing_raylet_is_detected_without_ray(tmp_path: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as head:
        address = f"{LOOPBACK}:{head.getsockname()[1]}"
        done = run([*APART, sys.executable, "-W", "ignore", "-c", CONNECTS, address], tmp_path)
    assert (
        f"InfrastructureError: no node of the Ray cluster at {address} runs on this machine"
        in done.stderr
    ), done.stderr


def drives(site: Site, folder: Path, *before: str) -> None:
    """Run a campaign that finds one node and publishes."""
    write_catalog(folder, CATALOG)
    done = site.cluster.run([*before, *drive(folder), PORTABLE])
    assert done.returncode == 0, done.stdout
    assert "Ray has 1 node(s) for portable" in done.stdout
    assert outcomes(folder)["good", PORTABLE]["verdict"] == "published"


@pytest.mark.slow
def test_a_node_without_cpus_can_drive(site: Site, tmp_path: Path) -> None:
    joined = site.cluster.start(num_cpus=0, network=site.network, before=APART)
    there = [
        "nsenter",
        f"--target={joined.processes('raylet')[0].pid}",
        "--pid",
        "--mount",
        "--net",
    ]
    home, *workers = site.cluster.run([*there, sys.executable, "-c", STANDS_ON]).stdout.split()
    assert len(workers) == 1
    assert home not in workers
    drives(site, tmp_path, *there)
    joined.kill()


@pytest.mark.slow
def test_a_ray_client_can_drive(site: Site, tmp_path: Path) -> None:
    drives(site, tmp_path, *site.there, "env", f"RAY_ADDRESS=ray://{site.network.here}:{site.port}")
