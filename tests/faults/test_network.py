"""The network between nodes: cut, and healed or not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.cluster.conftest import V3, V4
from tests.support.fault_sites import Driver, Site
from tests.support.raylets import Network

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not Network.allowed(), reason="needs the right to make network namespaces, and iproute2"
    ),
]


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(f"cp{os.getpid() % 100_000}", 1 + os.getpid() % 250) as found:
        yield found


def cut(site: Site, network: Network) -> Driver:
    """Run a campaign and cut the network to the v3 node during a build."""
    site.cluster.ip = network.here
    site.cluster.start(num_cpus=1, classes=[V4])
    site.cluster.start(num_cpus=1, classes=[V3], network=network)
    driver = site.campaign_at(f"build a {V3}")
    network.cut()
    return driver


@pytest.mark.parametrize("silent_s", [5, 60], ids=["briefly", "longer-than-ray-waits"])
def test_the_network_to_a_node_is_cut(site: Site, network: Network, silent_s: int) -> None:
    driver = cut(site, network)
    time.sleep(silent_s)
    network.heal()
    if silent_s > 30:  # Ray has dropped the node, and its raylet has ended
        site.add_node()
    site.check_recovery(driver)


def test_the_network_to_a_node_is_cut_for_good(site: Site, network: Network) -> None:
    driver = cut(site, network)
    site.add_node()
    site.check_recovery(driver)
