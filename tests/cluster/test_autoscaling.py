"""A campaign on a cluster whose nodes Ray's autoscaler starts and ends."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import V3, V4, write_slow_catalog
from tests.support.campaign_runs import outcomes
from tests.support.local_machines import HEAD, identity, write_settings
from tests.support.raylets import RayCluster, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def machines(folder: Path) -> set[str]:
    """The machines that were ever started."""
    return {path.stem for path in folder.glob("machine-*.log")}


def running(names: set[str]) -> set[str]:
    """Those of some machines whose raylet runs."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.name() == "raylet":
                found.add(process.environ().get("RAY_CLOUD_INSTANCE_ID", ""))
        except psutil.Error:
            continue
    return found & names


def test_machines_are_started_for_a_campaign_and_ended(
    private_cluster: RayCluster, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    write_slow_catalog(models, "abcd", seconds=2.0)
    types = {
        "v4": {"resources": {"CPU": 1}, "labels": {f"coldpress.dev/{V4}": "true"}, "max_workers": 2}
    }
    file = write_settings(tmp_path, private_cluster.address, types, idle_minutes=0.25)
    private_cluster.start(
        num_cpus=1,
        classes=[V3],
        environ={
            **identity(HEAD, HEAD),
            "RAY_enable_autoscaler_v2": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        },
        options=[f"--autoscaling-config={file}"],
    )
    command = [sys.executable, "-m", "jobs.optimize", str(models / "catalog.yaml")]
    command += ["--device-class", V4, "--address", private_cluster.address]
    command += ["--store", str(models / "store"), "--tracking-uri", f"sqlite:///{models}/mlflow.db"]
    command += ["--json", str(models / "out.json")]
    refused = private_cluster.run(command)
    assert refused.returncode == 3, refused.stdout
    assert machines(tmp_path) == set(), (
        "a campaign does not wait for nodes unless --wait-for-nodes is given"
    )
    done = private_cluster.run([*command, "--wait-for-nodes"], timeout_s=500)
    assert done.returncode == 0, done.stdout
    found = outcomes(models)
    assert set(found) == {(name, at) for name in "abcd" for at in (V4, "portable")}
    assert "failed" not in {outcome["verdict"] for outcome in found.values()}
    assert {outcome["num_threads"] for outcome in found.values()} == {1}
    assert machines(tmp_path) == {"machine-0", "machine-1"}, done.stdout
    wait_until(lambda: not running({"machine-0", "machine-1"}), "idle machines end", 120)
