"""The HTTP service and the Ray Serve application as processes: what starts them in production,
load, SIGTERM and SIGKILL.
"""

from __future__ import annotations

import asyncio
import configparser
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
import typer
import yaml
from safetensors.torch import load, save

import freezer
from benchmarks.serving_load import is_ready, load_url, running_service, start_service
from freezer.hardware import DEVICE_CLASSES, can_run
from freezer.store import Store
from infra.serving.model_server import BINARY, JSON
from infra.serving.service import main
from tests.infra.test_serving import X, json_of
from tests.support.manifests import check_manifest, manifests
from tests.support.raylets import LOOPBACK, ROOT, RayCluster, free_port, wait_until
from tests.support.steps import HERE

SERVING = ROOT / "infra" / "serving"


def unit_command(**values: str) -> list[str]:
    """ExecStart of the systemd unit, with this interpreter."""
    unit = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string((SERVING / "coldpress-serve@.service").read_text().replace("\\\n", ""))
    line = unit["Service"]["ExecStart"].replace("%i", values.pop("model"))
    for name, value in values.items():
        line = line.replace(f"${{{name}}}", value).replace(f"${name}", value)
    program, *rest = shlex.split(line)
    assert program == "/opt/coldpress/.venv/bin/python"
    return [sys.executable, *rest]


def test_sigterm_lets_accepted_requests_finish(published: Store) -> None:
    """Starts the process as the systemd unit does, and ends it while a client is still sending."""
    port, body = free_port(), json_of(X)
    command = unit_command(
        model="mlp",
        STORE=published.uri,
        HOST=LOOPBACK,
        PORT=str(port),
        THREADS="1",
        OPTIONS=f"--device-class {HERE} --queue 4",
    )
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            wait_until(lambda: is_ready(port), "the service is ready")
            with socket.create_connection((LOOPBACK, port), timeout=60) as client:
                client.sendall(
                    b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
                    + body[:10]
                )
                assert is_ready(port), "the service has read the first part"
                process.send_signal(signal.SIGTERM)
                wait_until(lambda: not can_connect(port), "no further connection is accepted")
                client.sendall(body[10:])
                assert client.recv(100).startswith(b"HTTP/1.1 200")
            assert process.wait(30) == 0
        finally:
            process.kill()


def can_connect(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_kubernetes_manifests_fit_schemas_and_commands() -> None:
    (listed,) = manifests(SERVING / "kubernetes.yaml")
    for item in listed["items"]:
        check_manifest(item)
    pods = [item["spec"]["template"] for item in listed["items"] if item["kind"] == "Deployment"]
    classes = [pod["metadata"]["labels"]["coldpress.dev/class"] for pod in pods]
    for name, pod in zip(classes, pods, strict=True):
        (server,) = pod["spec"]["containers"]
        assert server["args"] == [f"--device-class={name}"]
        parse(server["command"][3:] + server["args"])
    for machine in DEVICE_CLASSES:
        labels = {f"coldpress.dev/{name}" for name in DEVICE_CLASSES if can_run(name, machine)}
        placed = [name for name, pod in zip(classes, pods, strict=True) if selects(pod, labels)]
        best = [name for name in ("cpu-x86-64-v4", "cpu-x86-64-v3") if can_run(name, machine)]
        assert placed == best[:1], machine


def selects(pod: dict[str, Any], labels: set[str]) -> bool:
    """Whether the node affinity of a pod allows a node with these labels, all of which are
    `true`.
    """
    (term,) = pod["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    return all(
        (item["key"] in labels) == (item["operator"] == "In") for item in term["matchExpressions"]
    )


def parse(words: list[str]) -> None:
    """Parse a command line of the service; the test fails if it is wrong."""
    program = typer.Typer()
    program.command()(main)
    typer.main.get_command(program).make_context("service", words)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is missing: install it (Debian: apt-get install systemd)")
    text = (
        (SERVING / "coldpress-serve@.service")
        .read_text()
        .replace("/opt/coldpress/.venv/bin/python", sys.executable)
    )
    unit = tmp_path / "coldpress-serve@mlp.service"
    unit.write_text(text)
    done = subprocess.run(
        [program, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_kill_9_loses_only_requests_in_flight(published: Store) -> None:
    """Eight clients load a process that is killed, and started again as systemd would; until it is
    ready, it refuses them.
    """
    port, ended = free_port(), threading.Event()
    processes = [start_service("mlp", published.uri, port, "--device-class", HERE)]

    def supervise() -> None:
        while True:
            processes[-1].wait()
            if ended.is_set():
                return
            processes.append(start_service("mlp", published.uri, port, "--device-class", HERE))

    supervisor = threading.Thread(target=supervise)
    supervisor.start()
    killing = threading.Timer(3, lambda: processes[-1].kill())
    killing.start()
    try:
        load = asyncio.run(
            load_url(
                f"http://{LOOPBACK}:{port}/predict",
                save({"x": X}),
                BINARY,
                concurrency=8,
                seconds=20,
            )
        )
        assert is_ready(port)
    finally:
        ended.set()
        processes[-1].terminate()
        supervisor.join(30)
    assert len(processes) == 2
    assert set(load.statuses) <= {0, 200, 503}
    assert load.statuses.get(0, 0) <= 8, "at most one request of each client was in flight"
    assert load.statuses[200] > 100


@pytest.mark.slow
def test_sigterm_under_load_breaks_no_request(published: Store) -> None:
    """Clients that keep their connections get answers on them until the end, and cannot connect
    again.
    """
    port = free_port()
    process = start_service("mlp", published.uri, port, "--device-class", HERE)
    ending = threading.Timer(3, process.terminate)
    ending.start()
    load = asyncio.run(
        load_url(
            f"http://{LOOPBACK}:{port}/predict", save({"x": X}), BINARY, concurrency=8, seconds=6
        )
    )
    assert process.wait(30) == 0
    assert set(load.statuses) == {200}
    assert load.statuses[200] > 100


@pytest.mark.slow
def test_load_is_answered_or_refused(published: Store) -> None:
    """With room in the queue all requests are answered; without, the others are refused, and none
    fails.
    """
    body, expected = save({"x": X}), {200}
    for queue in ("64", "0"):
        with running_service("mlp", published.uri, "--device-class", HERE, "--queue", queue) as url:
            load = asyncio.run(load_url(url, body, BINARY, concurrency=16, seconds=5))
        assert set(load.statuses) == expected
        expected = {200, 503}


@pytest.mark.slow
@pytest.mark.cluster
def test_ray_serve_places_classes_on_their_nodes(published: Store, tmp_path: Path) -> None:
    """Deploys serve.yaml, for a node of this machine's class and one without a class."""
    config, port = yaml.safe_load((SERVING / "serve.yaml").read_text()), free_port()
    (application,) = config["applications"]
    assert set(application["args"]["replicas"]) < set(DEVICE_CLASSES)
    application["args"] |= {
        "model": "mlp",
        "store": published.uri,
        "threads": 1,
        "replicas": {HERE: 1, "portable": 1},
    }
    config |= {"http_options": {"host": LOOPBACK, "port": port}, "proxy_location": "HeadOnly"}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    with RayCluster(tmp_path / "cluster") as cluster:
        cluster.start(num_cpus=2, classes=[HERE])
        cluster.start(num_cpus=2)
        with cluster.popen(
            [str(Path(sys.executable).with_name("serve")), "run", str(tmp_path / "serve.yaml")]
        ) as driver:
            try:
                url = f"http://{LOOPBACK}:{port}/resnet50"
                wait_until(
                    lambda: can_connect(port) and requests.get(url, timeout=60).ok,
                    "the application answers",
                    180,
                )
                contracts = [requests.get(url, timeout=60).json() for _ in range(40)]
                assert {item["device_class"] for item in contracts} == {HERE, "portable"}
                expected = freezer.load("mlp", store=published.uri, device_class=HERE)(X)
                for body, media_type in ((json_of(X), JSON), (save({"x": X}), BINARY)):
                    answer = requests.post(
                        url, data=body, headers={"content-type": media_type}, timeout=60
                    )
                    found = (
                        answer.json()["output"]
                        if media_type == JSON
                        else load(answer.content)["output"]
                    )
                    torch.testing.assert_close(torch.as_tensor(found), expected)
                wrong = requests.post(url, data=json_of(X[:, :3]), timeout=60)
                assert wrong.status_code == 422
                assert "got shape [2, 3]" in wrong.json()["detail"]
            finally:
                driver.send_signal(signal.SIGINT)
                driver.communicate(timeout=60)
