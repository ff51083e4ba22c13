"""A site for each scenario; what it found goes into the JUnit report, from which benchmarks/faults.py makes the table."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from freezer.device_class import detect
from tests.cluster.conftest import V4
from tests.faults.sites import Site
from tests.raylets import RayCluster


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without content; to make one takes seconds."""
    path = tmp_path_factory.mktemp("database") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}", f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def site(tmp_path: Path, database: Path, record_property: Callable[[str, object], None]) -> Iterator[Site]:
    """A site without raylets yet."""
    if V4 not in detect().classes:
        pytest.skip("needs a CPU of x86-64-v4, one node of which is told to be a lesser one")
    shutil.copy(database, tmp_path)
    with RayCluster(tmp_path / "cluster") as cluster:
        found = Site(folder=tmp_path, cluster=cluster)
        try:
            yield found
        finally:
            for driver in found.drivers:
                if driver.process.poll() is None:
                    driver.process.kill()
                    driver.process.wait(30)
        planned = len(found.expected)
        record_property("went_on", found.went_on)
        record_property("recovery_s", f"{found.recovery_s:.0f}")
        record_property("lost", f"{planned - found.num_found} of {planned} outcomes")
        record_property("published", f"{found.num_verified}")
