"""The check of every scenario for processes that outlive their cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil

from tests.raylets import RayCluster


def test_processes_that_outlive_the_cluster_are_killed(tmp_path: Path) -> None:
    with RayCluster(tmp_path / "home") as cluster:
        with subprocess.Popen(["sleep", "1000"], env=cluster.environment, start_new_session=True) as stray:
            assert list(cluster.left(0)) == [stray.pid]
            (command,) = cluster.end(0.5)
            assert command.endswith("sleep 1000")
        assert not psutil.pid_exists(stray.pid)
