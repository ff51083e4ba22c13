"""Processes that die, hang or are told to go: workers, children, nodes, the driver, the head, MLflow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.cluster.conftest import V3, V4
from tests.faults.sites import Site, wait_until
from tests.raylets import DIES_WITH_US, Raylet, free_port

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]
on_the_standing_cluster = pytest.mark.usefixtures("standing")


def workers(raylet: Raylet, task: str) -> list[psutil.Process]:
    """Ray's worker processes of a node that run a task of this name."""
    return [process for process in raylet.processes() if task in " ".join(process.cmdline())]


def children(raylet: Raylet) -> list[psutil.Process]:
    """The isolated children on a node: forked by forkservers, and no resource trackers."""
    servers = [p for p in raylet.processes() if "multiprocessing.forkserver" in " ".join(p.cmdline())]
    return [child for server in servers for child in server.children() if child.pid != server.pid]


@on_the_standing_cluster
def test_nothing_happens(site: Site) -> None:
    """What the others are to be held against: how long a campaign takes from its first build to its end."""
    site.head()
    site.node()
    driver = site.drive()
    driver.until(f"build a {V4}")
    site.strikes()
    site.recovered(driver)


@on_the_standing_cluster
@pytest.mark.parametrize("task", ["build", "judge"])
def test_a_worker_is_killed_in_mid(site: Site, task: str) -> None:
    head = site.head()
    site.node()
    driver = site.drive()
    driver.until(f"{task} a {V4}")
    wait_until(lambda: workers(head, f"{task} a {V4}"), "the worker runs")
    site.strikes()
    for process in workers(head, f"{task} a {V4}"):
        process.kill()
    site.recovered(driver)
    assert "attempt 2 of" in driver.said


@on_the_standing_cluster
def test_the_child_of_a_build_is_killed(site: Site) -> None:
    head = site.head()
    site.node()
    driver = site.drive()
    driver.until(f"build a {V4}")
    wait_until(lambda: children(head), "a child runs")
    site.strikes()
    for child in children(head):
        child.kill()
    site.recovered(driver)
    assert "attempt 2 of" in driver.said


@on_the_standing_cluster
def test_the_forkserver_of_a_worker_is_killed(site: Site) -> None:
    head = site.head()
    site.node()
    driver = site.drive()
    driver.until(f"built a {V4}")
    site.strikes()
    for process in head.processes():
        if "multiprocessing.forkserver" in " ".join(process.cmdline()):
            process.kill()
    site.recovered(driver)


@pytest.mark.parametrize("task", ["build", "judge"])
def test_a_node_dies_and_another_goes_on_in_mid(site: Site, task: str) -> None:
    site.head()
    dying = site.node(V3)
    driver = site.drive()
    driver.until(f"{task} a {V3}")
    site.strikes()
    dying.kill()
    site.node(V3)
    site.recovered(driver)


def test_the_raylet_alone_dies(site: Site) -> None:
    """Not its machine: what it started must end with it."""
    site.head()
    dying = site.node(V3)
    driver = site.drive()
    driver.until(f"build a {V3}")
    site.strikes()
    for process in dying.processes("raylet"):
        process.kill()
    site.node(V3)
    site.recovered(driver)


def test_a_node_is_preempted(site: Site) -> None:
    """Told to go by SIGTERM, as spot machines are."""
    site.head()
    leaving = site.node(V3)
    driver = site.drive()
    driver.until(f"build a {V3}")
    site.strikes()
    leaving.stop()
    site.node(V3)
    site.recovered(driver)


def test_a_node_hangs_and_comes_back(site: Site) -> None:
    site.head()
    hanging = site.node(V3)
    driver = site.drive()
    driver.until(f"build a {V3}")
    site.strikes()
    hanging.freeze()
    time.sleep(45)  # Ray gives a node up after 30 s of silence
    hanging.thaw()
    site.node(V3)
    site.recovered(driver)


def test_a_node_joins_late(site: Site) -> None:
    site.head()
    driver = site.drive("wait_s=300")
    driver.until("waiting up to")
    site.strikes()
    site.node(V3)
    site.recovered(driver)


@on_the_standing_cluster
@pytest.mark.parametrize("at", [f"build a {V4}", f"judge a {V4}", "published"], ids=lambda at: at.split()[0])
def test_the_driver_is_killed(site: Site, at: str) -> None:
    site.names = "ab" if at == "published" else "a"
    site.head()
    site.node()
    driver = site.drive()
    driver.until(at)
    site.strikes()
    driver.kill()
    site.recovered(driver, again=site.drive())


@on_the_standing_cluster
def test_the_driver_is_killed_while_it_publishes(site: Site) -> None:
    """At the first blob that lies in the store: between it and the index."""
    site.head()
    site.node()
    driver = site.drive()
    wait_until(lambda: any(site.store.glob("*/blobs/sha256/*")), "a blob is written", 200)
    site.strikes()
    driver.kill()
    site.recovered(driver, again=site.drive())


def test_the_head_dies(site: Site) -> None:
    head = site.head()
    site.node()
    driver = site.drive()
    driver.until(f"built a {V4}")
    site.strikes()
    head.kill()
    assert driver.end(300) == 3, driver.said
    assert "Traceback" not in driver.said
    for raylet in site.cluster.raylets:
        raylet.stop()
    site.cluster.raylets.clear()
    site.cluster.port = free_port()
    site.head()
    site.node()
    site.recovered(driver, again=site.drive())


@pytest.fixture
def server(site: Site) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts an MLflow server on the site's database, again at the same address."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", site.tracking_uri, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--artifacts-destination", str(site.folder / "mlartifacts"), "--workers", "1"]
    environ = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    site.server_uri = f"http://127.0.0.1:{port}"
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        started.append(subprocess.Popen([*DIES_WITH_US, *command], env=environ, cwd=site.folder, **quiet))
        _answers(site.tracking_uri)
        return started[-1]

    yield start
    for process in started:
        _kill_tree(process)


@on_the_standing_cluster
def test_the_mlflow_server_is_killed(site: Site, server: Callable[[], subprocess.Popen[bytes]]) -> None:
    """Models are published all the same; a replay brings the server up to date once it runs again."""
    site.names = "ab"
    process = server()
    site.head()
    site.node()
    driver = site.drive()
    driver.until("published")
    site.strikes()
    _kill_tree(process)
    assert driver.end() == 3, driver.said
    site.check_outcomes()
    site.check_store()
    server()
    words = ["faults", "--store", str(site.store), "--tracking-uri", site.tracking_uri]
    replayed = site.cluster.run([sys.executable, "-m", "jobs.replay", *words])
    assert replayed.returncode == 0, replayed.stdout
    site.went_on = "replayed"
    site.recovery_s = time.monotonic() - site.struck_at
    site.check_whole()


def _answers(uri: str) -> None:
    import requests

    def healthy() -> bool:
        try:
            return requests.get(f"{uri}/health", timeout=2).ok
        except requests.ConnectionError:
            return False

    wait_until(healthy, "the server answers", 90)


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait(30)


@on_the_standing_cluster
def test_a_second_driver_of_the_campaign_refuses(site: Site) -> None:
    site.head()
    site.node()
    driver = site.drive()
    driver.until(f"build a {V4}")
    site.strikes()
    second = site.drive()
    assert second.end(120) == 3, second.said
    assert "CP-CAMPAIGN-RUNNING" in second.said
    site.recovered(driver)


@on_the_standing_cluster
def test_two_campaigns_share_the_cluster_and_the_store(site: Site) -> None:
    """Of the same catalog: what one has built, the other need not build."""
    site.names = "ab"
    site.head()
    site.node()
    first = site.drive()
    first.until(f"build a {V4}")
    site.strikes()
    second = site.drive(campaign="other")
    assert second.end() == 0, second.said
    assert first.end() == 0, first.said
    site.recovery_s = time.monotonic() - site.struck_at
    site.check_outcomes()
    site.check_store()
    site.check_nothing_left()


@on_the_standing_cluster
def test_a_driver_hangs_and_comes_back(site: Site) -> None:
    """On its own machine nobody takes over what a living process holds."""
    site.head()
    site.node()
    driver = site.drive()
    driver.until(f"built a {V4}")
    site.strikes()
    driver.process.send_signal(signal.SIGSTOP)
    try:
        second = site.drive()
        assert second.end(120) == 3, second.said
        assert "CP-CAMPAIGN-RUNNING" in second.said
        time.sleep(40)
    finally:
        driver.process.send_signal(signal.SIGCONT)
    site.recovered(driver)
