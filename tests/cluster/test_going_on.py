"""A campaign that is stopped, and goes on with other nodes than it was started with."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cluster.conftest import V3
from tests.cluster.test_two_nodes import catalog, lines_until, outcomes, watched
from tests.pipeline.test_whole_campaigns import built_in
from tests.raylets import RayCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_keys_stay_where_the_smallest_node_of_a_class_is_gone(private_cluster: RayCluster, tmp_path: Path) -> None:
    folder = tmp_path / "going-on"
    catalog(folder, "ab")
    private_cluster.start(num_cpus=2, classes=[V3])
    small = private_cluster.start(num_cpus=1, classes=[V3])
    command = watched(folder, f"device_classes={V3}")
    with private_cluster.popen(command) as driver:
        said = lines_until(driver, " judged ")
        driver.send_signal(signal.SIGINT)
        said += driver.communicate(timeout=100)[0]
    assert driver.returncode == 130, said
    small.kill()
    done = private_cluster.run(command)
    assert done.returncode == 0, said + done.stdout
    assert {item["num_threads"] for item in outcomes(folder).values()} == {1}, said + done.stdout
    assert built_in(said)
    assert built_in(done.stdout).isdisjoint(built_in(said))
    assert {item["version"] for item in outcomes(folder).values()} == {1}
