"""A site for each scenario; what it found goes into the JUnit report, from which benchmarks/faults.py makes the table.

A scenario that leaves raylets as they were says `usefixtures("standing")`: these come first, and share one cluster.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from freezer.hardware.machine import detect
from tests.cluster.conftest import V3, V4
from tests.faults.sites import Site
from tests.raylets import RayCluster

STANDING = "standing"


class Shared:
    """One cluster that stands while scenarios share it."""

    def __init__(self, make: Callable[[], RayCluster]) -> None:
        self._make = make
        self._cluster: RayCluster | None = None

    def stand(self) -> RayCluster:
        """The cluster; a new one where something of it has died."""
        if self._cluster is not None and any(raylet.process.poll() is not None for raylet in self._cluster.raylets):
            self.end()
        if self._cluster is None:
            self._cluster = self._make().__enter__()
            self._cluster.start(num_cpus=1, classes=[V4])
            self._cluster.start(num_cpus=1, classes=[V3])
        return self._cluster

    def end(self) -> None:
        """Let other clusters have the machine."""
        if self._cluster is not None:
            cluster, self._cluster = self._cluster, None
            assert cluster.end() == [], "outlived all raylets"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that share a cluster first."""
    items.sort(key=lambda item: STANDING not in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without content; to make one takes seconds."""
    path = tmp_path_factory.mktemp("database") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}", f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    found = Shared(lambda: RayCluster(tmp_path_factory.mktemp("cluster")))
    yield found
    found.end()


@pytest.fixture
def standing() -> None:
    """Says of a scenario that it leaves raylets as they were."""


@pytest.fixture
def site(
    tmp_path: Path, database: Path, shared: Shared, record_property: Callable[[str, object], None], request: pytest.FixtureRequest
) -> Iterator[Site]:
    """A site without raylets yet; or with a head for v4 and a node for v3 that stand already."""
    if V4 not in detect().classes:
        pytest.skip("needs a CPU of x86-64-v4, one node of which is told to be a lesser one")
    shutil.copy(database, tmp_path)
    stands = STANDING in request.fixturenames
    if not stands:
        shared.end()
    found = Site(folder=tmp_path, cluster=shared.stand() if stands else RayCluster(tmp_path / "cluster").__enter__(), stands=stands)
    try:
        yield found
    finally:
        for driver in found.drivers:
            driver.end_now()
        outlived = [] if stands else found.cluster.end()
    planned = len(found.expected)
    record_property("went_on", found.went_on)
    record_property("recovery_s", f"{found.recovery_s:.0f}")
    record_property("lost", f"{planned - found.num_found} of {planned} outcomes")
    record_property("published", f"{found.num_verified}")
    assert outlived == [], "outlived all raylets"
