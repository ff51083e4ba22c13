"""Sites for scenarios.

The recorded properties go into the JUnit report, which benchmarks/faults.py turns into a table.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.conftest import V3, V4, skip_without_v4
from tests.support.fault_sites import Site
from tests.support.raylets import RayCluster

Record = Callable[[str, object], None]


@pytest.fixture(scope="package")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """A head for v4 and a node for v3, for scenarios that harm neither."""
    skip_without_v4()
    with RayCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        cluster.start(num_cpus=1, classes=[V4])
        cluster.start(num_cpus=1, classes=[V3])
        yield cluster


@contextmanager
def recorded(site: Site, record: Record) -> Iterator[Site]:
    yield site
    for driver in site.drivers:
        driver.close()
    record("went_on", site.went_on)
    record("recovery_s", f"{site.recovery_s:.0f}")
    record("published", f"{site.num_verified}")


@pytest.fixture
def site(tmp_path: Path, template: Path, record_property: Record) -> Iterator[Site]:
    """A site whose cluster has no raylets yet."""
    skip_without_v4()
    shutil.copy(template / "mlflow.db", tmp_path)
    with (
        RayCluster(tmp_path / "cluster") as cluster,
        recorded(Site(folder=tmp_path, cluster=cluster), record_property) as found,
    ):
        yield found


@pytest.fixture
def shared_site(
    tmp_path: Path, template: Path, shared_cluster: RayCluster, record_property: Record
) -> Iterator[Site]:
    """A site on the shared cluster."""
    shutil.copy(template / "mlflow.db", tmp_path)
    with recorded(Site(folder=tmp_path, cluster=shared_cluster), record_property) as found:
        yield found
