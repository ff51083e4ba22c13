"""A cluster with Ray's default authentication, on machines where a campaign ran locally before."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from freezer.hardware import PORTABLE
from tests.support.raylets import RayCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

LOCAL = "from pipeline.cluster.client import connect; connect(None).__enter__()"
CONNECTS = """
import platform, sys
from pipeline.cluster.client import connect
with connect(sys.argv[1]) as cluster:
    options = {"name": "n", "class_name": "portable", "num_cpus": 0}
    started = [cluster.start(platform.node, node=node, **options) for node in cluster.nodes()]
    done = [cluster.wait([handle], timeout_s=60)[0] for handle in started]
    print("tasks ran on", sum(isinstance(one.value, str) for one in done), "of", len(done), "nodes")
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
    """A head with Ray's defaults; a local Ray has written a token into the home of its user."""
    with RayCluster(tmp_path / "home", auth_mode=None) as found:
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", LOCAL],
            env=found.environment,
            cwd=found.folder,
            check=True,
        )
        assert (found.folder / ".ray" / "auth_token").is_file()
        found.start(num_cpus=1, classes=[PORTABLE])
        yield found


def connected(cluster: RayCluster, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", CONNECTS, cluster.address]
    environ = {**cluster.environment, **environ}
    return subprocess.run(
        command,
        env=environ,
        cwd=cluster.folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_cluster_with_the_token_of_a_local_run(cluster: RayCluster) -> None:
    bare = connected(cluster)
    assert f"InfrastructureError: Ray at {cluster.address} rejects the token (" in bare.stderr
    assert (
        "RAY_AUTH_MODE is not set here); set RAY_AUTH_MODE=token here, and copy ~/.ray/auth_token"
        " from the head" in bare.stderr
    )
    absent = connected(cluster, RAY_AUTH_MODE="token", HOME=str(cluster.folder.parent))
    assert f"InfrastructureError: Ray at {cluster.address} rejects the token (" in absent.stderr

    labels = [sys.executable, "-m", "jobs.worker_labels", "--environment"]
    printed = subprocess.run(
        labels,
        env=cluster.environment,
        cwd=cluster.folder,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    documented = dict(word.split("=", 1) for word in printed.split())
    cluster.start(num_cpus=1, classes=[PORTABLE], environ=documented)
    joined = connected(cluster, **documented)
    assert joined.stdout == "tasks ran on 2 of 2 nodes\n", joined.stderr
