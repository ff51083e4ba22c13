"""A campaign on a cluster of Ray's own autoscaler, which starts machines for it and gives them back."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

from freezer.hardware.machine import detect
from tests.cluster.conftest import V3, V4
from tests.cluster.local_machines import HEAD, named, settings
from tests.cluster.test_two_nodes import catalog
from tests.raylets import RayCluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(V4 not in detect().classes, reason="needs a CPU of x86-64-v4, one node of which is told to be a lesser one"),
]

UPDATE_S = "1"
GIVEN_BACK_S = 120.0


def machines(folder: Path) -> set[str]:
    """Those that were ever started."""
    return {path.stem for path in folder.glob("machine-*.log")}


def alive(names: set[str]) -> set[str]:
    """The machines of these names whose raylet runs."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.name() == "raylet":
                found.add(process.environ().get("RAY_CLOUD_INSTANCE_ID", ""))
        except psutil.Error:
            continue
    return found & names


def test_machines_are_started_for_a_class_that_has_none_and_given_back(private_cluster: RayCluster, tmp_path: Path) -> None:
    models = tmp_path / "models"
    catalog(models, "abcd", seconds=2.0)
    types = {"v4": {"resources": {"CPU": 1}, "labels": {f"coldpress.dev/{V4}": "true"}, "max_workers": 2}}
    file = settings(tmp_path, private_cluster.address, types, idle_minutes=0.25)
    private_cluster.start(
        num_cpus=1,
        classes=[V3],
        environ={**named(HEAD, HEAD), "RAY_enable_autoscaler_v2": "1", "AUTOSCALER_UPDATE_INTERVAL_S": UPDATE_S},
        options=[f"--autoscaling-config={file}"],
    )
    places = ("--store", models / "store", "--tracking-uri", f"sqlite:///{models}/mlflow.db", "--address", private_cluster.address)
    command = [sys.executable, "-m", "jobs.optimize", models / "catalog.yaml", *places, "--json", models / "out.json"]
    refused = private_cluster.run([*map(str, command), "--device-class", V4])
    assert refused.returncode == 3, refused.stdout
    assert machines(tmp_path) == set(), "nobody waits for nodes"
    done = private_cluster.run([*map(str, command), "--device-class", V4, "--wait-for-nodes", "--wait-limit", "200"], timeout_s=500)
    assert done.returncode == 0, done.stdout
    assert f"for nodes labelled coldpress.dev/{V4}=true; nodes serve portable, {V3}" in " ".join(done.stdout.split())
    outcomes = json.loads((models / "out.json").read_text())["outcomes"]
    found = {(item["model"], item["device_class"]) for item in outcomes if item["verdict"] != "failed"}
    assert found == {(name, at) for name in "abcd" for at in (V4, "portable")}
    assert {item["num_threads"] for item in outcomes} == {1}
    started = machines(tmp_path)
    assert started == {"machine-0", "machine-1"}, done.stdout
    deadline = time.monotonic() + GIVEN_BACK_S
    while alive(started) and time.monotonic() < deadline:
        time.sleep(1)
    assert alive(started) == set(), "they have nothing to do"
