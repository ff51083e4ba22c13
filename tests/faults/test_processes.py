"""Processes that die or hang: workers, children, nodes, the driver, the head, MLflow."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.cluster.conftest import V3, V4
from tests.support.fault_sites import Site
from tests.support.mlflow_servers import MlflowServer, server_options
from tests.support.raylets import Raylet, free_port, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]


def running(raylet: Raylet, words: str) -> list[psutil.Process]:
    """The processes of a node with these words in their command: Ray titles workers after their
    task.
    """
    return [process for process in raylet.processes() if words in " ".join(process.cmdline())]


def test_nothing_happens(shared_site: Site) -> None:
    """The reference: the time from the first build to the end of an undisturbed campaign."""
    shared_site.check_recovery(shared_site.campaign_at(f"build a {V4}"))


def forkservers(raylet: Raylet) -> list[psutil.Process]:
    return running(raylet, "import forkserver")


@pytest.mark.parametrize(
    ("words", "victims"),
    [
        (f"build a {V4}", lambda head: running(head, f"build a {V4}")),
        (f"judge a {V4}", lambda head: running(head, f"judge a {V4}")),
        (
            f"build a {V4}",
            lambda head: [child for server in forkservers(head) for child in server.children()],
        ),
        (f"built a {V4}", forkservers),
    ],
    ids=[
        "worker-during-a-build",
        "worker-during-a-judge",
        "child-of-a-build",
        "forkserver-of-a-worker",
    ],
)
def test_a_process_is_killed(
    shared_site: Site, words: str, victims: Callable[[Raylet], list[psutil.Process]]
) -> None:
    driver = shared_site.campaign_at(words)
    head = shared_site.cluster.raylets[0]
    wait_until(lambda: victims(head), "the process runs")
    shared_site.strike()
    for process in victims(head):
        process.kill()
    shared_site.check_recovery(driver)
    assert "attempt 2 of" in driver.output or victims is forkservers


def kill_raylet_only(node: Raylet) -> None:
    """Kill the raylet but not its machine: what it started must end with it."""
    for process in node.processes("raylet"):
        process.kill()


def hang(node: Raylet) -> None:
    node.freeze()
    time.sleep(45)  # Ray drops a node after 30 s of silence
    node.thaw()


@pytest.mark.parametrize(
    ("task", "fault"),
    [
        ("build", Raylet.kill),
        ("judge", Raylet.kill),
        ("build", kill_raylet_only),
        ("build", Raylet.stop),
        ("build", hang),
    ],
    ids=[
        "dies-during-a-build",
        "dies-during-a-judge",
        "loses-its-raylet",
        "is-preempted",
        "hangs-and-continues",
    ],
)
def test_a_node(site: Site, task: str, fault: Callable[[Raylet], None]) -> None:
    driver = site.campaign_at(f"{task} a {V3}")
    fault(site.cluster.raylets[1])
    site.add_node()
    site.check_recovery(driver)


def test_a_node_joins_late(site: Site) -> None:
    site.cluster.start(num_cpus=1, classes=[V4])
    driver = site.drive("wait_s=300")
    driver.wait_for("waiting up to")
    site.strike()
    site.add_node()
    site.check_recovery(driver)


@pytest.mark.parametrize(
    "at", [f"build a {V4}", f"judge a {V4}", "published"], ids=lambda at: at.split()[0]
)
def test_the_driver_is_killed_at(shared_site: Site, at: str) -> None:
    shared_site.names = "ab" if at == "published" else "a"
    driver = shared_site.campaign_at(at)
    driver.kill()
    shared_site.check_recovery(driver, again=shared_site.drive())


def test_the_driver_is_killed_while_publishing(shared_site: Site) -> None:
    """At the first blob in the store: before the index is written."""
    driver = shared_site.drive()
    wait_until(lambda: any(shared_site.store.glob("*/blobs/sha256/*")), "a blob is written", 200)
    shared_site.strike()
    driver.kill()
    shared_site.check_recovery(driver, again=shared_site.drive())


def test_the_head_dies(site: Site) -> None:
    driver = site.campaign_at(f"built a {V4}")
    site.cluster.raylets[0].kill()
    assert driver.end(300) == 3, driver.output
    assert "Traceback" not in driver.output
    for raylet in site.cluster.raylets:
        raylet.stop()
    site.cluster.raylets.clear()
    site.cluster.port = free_port()
    site.start_nodes()
    site.check_recovery(driver, again=site.drive())


@pytest.fixture
def server(shared_site: Site) -> Iterator[MlflowServer]:
    """A server on the site's database."""
    site = shared_site
    with MlflowServer(
        server_options(site.tracking_uri, str(site.folder / "mlartifacts")), site.folder
    ) as started:
        site.server_uri = started.uri
        yield started


def test_the_mlflow_server_is_killed(shared_site: Site, server: MlflowServer) -> None:
    """Models are published nevertheless; a replay updates the server once it runs again."""
    site = shared_site
    site.names = "ab"
    driver = site.campaign_at("published")
    server.kill()
    assert driver.end() == 3, driver.output
    site.check_outcomes()
    site.check_store()
    server.start()
    replay = [
        "-c",
        "from jobs.results import replay_app; replay_app()",
        "faults",
        "--store",
        str(site.store),
        "--tracking-uri",
        site.tracking_uri,
    ]
    replayed = site.cluster.run([sys.executable, *replay])
    assert replayed.returncode == 0, replayed.stdout
    site.went_on = "replayed"
    site.check_all()


def check_second_driver_is_refused(site: Site) -> None:
    second = site.drive()
    assert second.end(120) == 3, second.output
    assert "CP-CAMPAIGN-RUNNING" in second.output


def test_the_driver_hangs_and_continues(shared_site: Site) -> None:
    """No other driver on its machine takes over the campaign while its process exists."""
    driver = shared_site.campaign_at(f"built a {V4}")
    driver.process.send_signal(signal.SIGSTOP)
    check_second_driver_is_refused(shared_site)
    time.sleep(40)
    driver.process.send_signal(signal.SIGCONT)
    shared_site.check_recovery(driver)
