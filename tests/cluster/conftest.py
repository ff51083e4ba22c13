"""One real cluster of two unlike nodes, for all tests of this folder that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from freezer.hardware.machine import detect
from tests.raylets import RayCluster

V3, V4 = "cpu-x86-64-v3", "cpu-x86-64-v4"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """A head with 2 cores for x86-64-v4, and a node with 1 for x86-64-v3."""
    if V4 not in detect().classes:
        pytest.skip("needs a CPU of x86-64-v4, one node of which is told to be a lesser one")
    with RayCluster(tmp_path_factory.mktemp("cluster")) as found:
        found.start(num_cpus=2, classes=[V4])
        found.start(num_cpus=1, classes=[V3])
        yield found


@pytest.fixture
def private_cluster(tmp_path: Path) -> Iterator[RayCluster]:
    """A cluster that a test may break; it starts the nodes itself."""
    with RayCluster(tmp_path / "cluster") as found:
        yield found
