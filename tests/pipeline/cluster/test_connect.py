"""Connecting to Ray, and Ray as `coldpress doctor` finds it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from freezer.checks import CheckRequest
from freezer.errors import InfrastructureError
from pipeline.cluster import connect
from pipeline.cluster.client import check_ray
from tests.support.raylets import LOOPBACK, RayCluster, free_port


def test_local_ray_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises a plain Exception, here after half a minute on a busy machine."""

    def fail(**_: object) -> None:
        raise Exception("The current node timed out during startup.")  # noqa: TRY002

    for name in (
        "RAY_worker_niceness",
        "RAY_num_workers_soft_limit",
    ):  # `connect` sets them where they are not set
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", fail)
    with (
        pytest.raises(
            InfrastructureError, match=r"^no local Ray starts: The current node timed out"
        ),
        connect(None),
    ):
        pass


def test_an_address_without_ray_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (found,) = check_ray(CheckRequest())
    assert found.level == "ok"
    address = f"{LOOPBACK}:{free_port()}"
    (found,) = check_ray(CheckRequest(address=address))
    assert (found.level, address in found.remedy) == ("error", True)
    (found,) = check_ray(CheckRequest(address="http://127.0.0.1:8265"))
    assert (found.level, "that of a dashboard" in found.text) == ("error", True)


@pytest.mark.cluster
@pytest.mark.slow
def test_a_cluster_and_its_device_classes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "freezer.cli", "doctor", "--json"]
    with RayCluster(tmp_path) as cluster:
        for classes, level in (([], "warning"), (["cpu-x86-64-v3"], "ok")):
            cluster.start(num_cpus=1, classes=classes)
            done = cluster.run([*command, "--address", cluster.address])
            (found,) = [
                item
                for item in json.loads(done.stdout.splitlines()[-1])["findings"]
                if item["check"] == "Ray"
            ]
            assert found["level"] == level, found
    assert "2 nodes with CPUs, for portable, cpu-x86-64-v3" in found["text"]
