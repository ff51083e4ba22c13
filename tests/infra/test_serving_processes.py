"""The HTTP service and the Ray Serve application as processes: what starts them in production,
load, SIGTERM and SIGKILL.
"""

from __future__ import annotations

import configparser
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
import typer
import yaml
from safetensors.torch import load, save

import freezer
from freezer.hardware import DEVICE_CLASSES, can_run
from freezer.store import Store
from infra.serving.bodies import BINARY
from infra.serving.service import main
from tests.support.commands import finished
from tests.support.manifests import PROJECT, manifests
from tests.support.raylets import LOOPBACK, ROOT, RayCluster, free_port, wait_until
from tests.support.services import (
    X,
    is_ready,
    json_of,
)
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
    assert (program, rest[0]) == ("/opt/coldpress/.venv/bin/coldpress", "serve")
    return [sys.executable, "-m", "infra.serving.service", *rest[1:]]


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


COMMAND = """
from importlib.metadata import EntryPoint
import freezer.cli.app as cli
cli.entry_points = lambda group: [EntryPoint("serve", "{point}", group)]
cli.main()
"""


def test_coldpress_serve_logs_each_message_once(published: Store, tmp_path: Path) -> None:
    point = PROJECT["project"]["entry-points"]["coldpress.commands"]["serve"]
    port, log = free_port(), tmp_path / "log"
    words = ["serve", "mlp", f"--store={published.uri}", f"--port={port}"]
    command = [sys.executable, "-c", COMMAND.format(point=point), *words]
    with log.open("w") as file, subprocess.Popen(command, cwd=ROOT, stderr=file) as process:
        try:
            wait_until(lambda: is_ready(port), "the service is ready")
        finally:
            process.terminate()
        assert process.wait(30) == 0
    (line,) = [line for line in log.read_text().splitlines() if line.endswith(" serves")]
    assert line.startswith("INFO model mlp, version 1")


LACKING = """
import sys
sys.modules["uvicorn"] = None
from infra.serving.service import app
app(["mlp"])
"""


def test_serving_without_its_packages_exits_with_2() -> None:
    done = finished(sys.executable, "-c", LACKING, cwd=ROOT)
    assert (done.returncode, done.stderr.startswith("CP-DEPENDENCY: ")) == (2, True), done.stderr


def can_connect(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_deployments_select_their_nodes() -> None:
    """Each runs its class, on the machines that can run it and no better one."""
    documents = manifests(SERVING / "kubernetes.yaml")
    pods = [item["spec"]["template"] for item in documents if item["kind"] == "Deployment"]
    by_class = {pod["metadata"]["labels"]["coldpress.dev/class"]: pod for pod in pods}
    for name, pod in by_class.items():
        (server,) = pod["spec"]["containers"]
        assert server["args"] == [f"--device-class={name}"]
        assert server["command"][:2] == ["coldpress", "serve"]
        parse(server["command"][2:] + server["args"])
    for machine in DEVICE_CLASSES:
        labels = {f"coldpress.dev/{name}" for name in DEVICE_CLASSES if can_run(name, machine)}
        placed = [name for name, pod in by_class.items() if selects(pod, labels)]
        deployed = ("cpu-x86-64-v4", "cpu-x86-64-v3", "cpu-neoverse-v1")
        best = [name for name in deployed if can_run(name, machine)]
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
                answer = requests.post(url, data=json_of(X), timeout=60)
                torch.testing.assert_close(torch.tensor(answer.json()["output"]), expected)
                headers = {"content-type": BINARY}
                answer = requests.post(url, data=save({"x": X}), headers=headers, timeout=60)
                torch.testing.assert_close(load(answer.content)["output"], expected)
                assert requests.post(url, data=json_of(X[:, :3]), timeout=60).status_code == 422
            finally:
                driver.send_signal(signal.SIGINT)
                driver.communicate(timeout=60)
