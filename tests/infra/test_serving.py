"""The HTTP service and the Ray Serve application, over real HTTP; and what starts them in production."""

from __future__ import annotations

import asyncio
import configparser
import contextlib
import json
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
import typer
import yaml
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

import freezer
from benchmarks.serving_load import is_ready, load_url, running_service, start_service
from freezer.artifact.folder import GOLDEN_OUTPUTS, MEDIA_SAFETENSORS, Artifact, file_ref
from freezer.errors import UsageError
from freezer.files.scratch import cache_folder
from freezer.hardware.device_classes import DEVICE_CLASSES, can_run
from freezer.store.store import Store
from infra.serving import model_server
from infra.serving.model_server import BINARY, JSON, ModelServer, ServingOptions
from infra.serving.service import http_server, main
from tests.buckets import Wire, overwrite
from tests.conftest import Frozen
from tests.freezer.artifact.test_signatures import make_pair
from tests.infra.manifests import check_manifest, manifests
from tests.raylets import LOOPBACK, ROOT, RayCluster, free_port, wait_until
from tests.steps import HERE, copy_of, random_inputs, rewritten

SERVING = ROOT / "infra" / "serving"
X = random_inputs(2, 4)


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service in a thread of this process."""

    url: str
    server: ModelServer

    def predict(self, body: bytes, media_type: str = JSON) -> requests.Response:
        return requests.post(f"{self.url}/predict", data=body, headers={"content-type": media_type}, timeout=60)

    def get(self, path: str) -> requests.Response:
        return requests.get(f"{self.url}{path}", timeout=60)

    def metric(self, name: str, **labels: str) -> float:
        """A value of GET /metrics."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == f"coldpress_serving_{name}"]
        (found,) = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
        return float(found)

    def serves(self, version: int) -> bool:
        answer = self.get("/ready")
        return answer.status_code == 200 and answer.json()["version"] == str(version)


@contextmanager
def serving(store: Store, model: str = "mlp", **options: Any) -> Iterator[Service]:
    server = ModelServer(ServingOptions(model=model, store=store.uri, **{"device_class": HERE, "reload_s": 0.1, **options}))
    port = free_port()
    http = http_server(server, host=LOOPBACK, port=port)
    thread = threading.Thread(target=http.run)
    thread.start()
    try:
        wait_until(lambda: http.started, "the service listens")
        yield Service(url=f"http://{LOOPBACK}:{port}", server=server)
    finally:
        http.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def service(published: Store) -> Iterator[Service]:
    with serving(published, reload_s=60) as found:
        wait_until(lambda: found.serves(1), "version 1 serves")
        yield found


def json_of(tensor: Tensor) -> bytes:
    return json.dumps({"x": tensor.tolist()}).encode()


def publish(store: Store, artifact: Artifact) -> None:
    store.publish("mlp", source_key=artifact.manifest.verdict, artifacts={HERE: artifact}, carried={})


def other_artifact(frozen: Frozen, folder: Path) -> Artifact:
    """The same model as another artifact, with another file."""
    return with_golden(frozen, folder, error=0.0)


def wrong_artifact(scripted: Frozen, folder: Path) -> Artifact:
    """An artifact that does not give its golden outputs."""
    return with_golden(scripted, folder, error=1.0)


def with_golden(frozen: Frozen, folder: Path, *, error: float) -> Artifact:
    """A copy whose file of golden outputs is another."""
    artifact = copy_of(frozen.artifact, folder, verdict="kept-eager")
    path = folder / GOLDEN_OUTPUTS
    save_file({name: tensor + error for name, tensor in load_file(path).items()}, path, {"error": str(error)})
    golden = file_ref(folder, GOLDEN_OUTPUTS, MEDIA_SAFETENSORS)
    files = tuple(golden if item.path == GOLDEN_OUTPUTS else item for item in artifact.manifest.files)
    return rewritten(artifact, files=files)


def test_answers_equal_those_of_the_loaded_model(service: Service, published: Store) -> None:
    expected = freezer.load("mlp", store=published.uri, device_class=HERE)(X)
    as_json, as_file = service.predict(json_of(X)), service.predict(save({"x": X}), BINARY)
    assert torch.equal(torch.tensor(as_json.json()["output"]), expected)
    assert torch.equal(load(as_file.content)["output"], expected)
    assert (as_json.headers["content-type"], as_file.headers["content-type"]) == (JSON, BINARY)
    contract = service.get("/contract").json()
    assert [item["name"] for item in contract["inputs"]["inputs"]] == ["x"]
    assert [item["name"] for item in contract["outputs"]] == ["output"]


def test_native_runtime_answers_both_forms(inductor: Frozen, tmp_path: Path) -> None:
    store, x = Store.open(str(tmp_path), create=True), random_inputs(2, 3, 16, 16)
    store.publish("conv", source_key="key", artifacts={HERE: inductor.artifact}, carried={})
    expected = freezer.load("conv", store=store.uri)(x)
    with serving(store, "conv", runtime="native") as native:
        wait_until(lambda: native.serves(1), "version 1 serves")
        torch.testing.assert_close(torch.tensor(native.predict(json_of(x)).json()["output"]), expected)
        torch.testing.assert_close(load(native.predict(save({"x": x}), BINARY).content)["output"], expected)


@pytest.mark.parametrize(
    ("body", "media_type", "message"),
    [
        (json_of(X[:, :3]), JSON, "got shape [2, 3], expected ['batch', 4] with batch from 1 to 4"),
        (save({"x": X.double()}), BINARY, "got dtype float64, expected float32"),
        (json.dumps({"x": [[1, 2, 3, "4"]]}).encode(), JSON, "values that are not all float32"),
        (json.dumps({"x": [[1, 2, 3, 4], [1]]}).encode(), JSON, "lists of different lengths"),
        (json.dumps({"x": X.tolist(), "y": 1}).encode(), JSON, "input 'y' is unknown; expected x"),
        (b"{}", JSON, "input 'x': got nothing"),
        (b"[1]", JSON, "expected an object with x"),
        (b"\xff{", JSON, "the body is not JSON"),
        (b"x", BINARY, "the body is not a .safetensors file"),
    ],
)
def test_wrong_input_gets_422_with_the_message(service: Service, body: bytes, media_type: str, message: str) -> None:
    before = service.metric("requests_total", outcome="invalid")
    answer = service.predict(body, media_type)
    assert answer.status_code == 422
    detail = answer.json()["detail"]
    assert detail.startswith("CP-CONTRACT: ")
    assert message in detail
    assert service.metric("requests_total", outcome="invalid") == before + 1


def test_unready_until_an_artifact_has_loaded(scripted: Frozen, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    with serving(store) as started:
        wait_until(lambda: started.metric("reloads_total", outcome="failed"), "it has tried to load")
        for answer in (started.get("/ready"), started.get("/contract"), started.predict(json_of(X))):
            assert answer.status_code == 503
            assert "model 'mlp' is not in store" in answer.json()["detail"]
        assert started.get("/live").status_code == 200
        publish(store, wrong_artifact(scripted, tmp_path / "wrong"))
        wait_until(lambda: started.metric("canary_failures_total"), "the canary has run")
        assert started.get("/ready").status_code == 503
        publish(store, other_artifact(scripted, tmp_path / "other"))
        wait_until(lambda: started.serves(2), "version 2 serves")
        assert started.predict(json_of(X)).status_code == 200


def test_stateful_models_are_refused(scripted: Frozen, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    publish(store, copy_of(scripted.artifact, tmp_path / "stateful", stateful=True))
    with serving(store) as started:
        wait_until(lambda: started.metric("reloads_total", outcome="failed"), "it has tried to load")
        assert "it keeps state between calls" in started.get("/ready").json()["detail"]


class Held:
    """A model whose calls wait until they are released."""

    def __init__(self, model: Any) -> None:
        self._model, self.entered, self.released = model, threading.Event(), threading.Event()

    def __call__(self, **inputs: Any) -> Any:
        self.entered.set()
        assert self.released.wait(60)
        return self._model(**inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def test_a_reload_and_a_full_queue_lose_nothing(store: Store, scripted: Frozen, tmp_path: Path) -> None:
    """One request runs and one waits; a third is refused. Meanwhile a new version is loaded, and one with a wrong canary is not."""
    with serving(store, queue=1) as started, ThreadPoolExecutor() as clients:
        wait_until(lambda: started.serves(1), "version 1 serves")
        assert started.server.loaded is not None
        held = Held(started.server.loaded.model)
        started.server.loaded = replace(started.server.loaded, model=held)
        running = clients.submit(started.predict, json_of(X))
        assert held.entered.wait(60)
        waiting = clients.submit(started.predict, json_of(X))
        wait_until(lambda: started.metric("queue_length") == 1, "a request waits")
        refused = started.predict(json_of(X))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        publish(store, other_artifact(scripted, tmp_path / "other"))
        wait_until(lambda: started.serves(2), "version 2 serves")
        publish(store, wrong_artifact(scripted, tmp_path / "wrong"))
        wait_until(lambda: started.metric("canary_failures_total"), "the canary has run")
        assert started.serves(2)
        held.released.set()
        assert [running.result().status_code, waiting.result().status_code] == [200, 200]
        info = store.version("mlp:2").images[HERE]
        labels = {"model": "mlp", "version": "2", "device_class": HERE, "digest": info.digest}
        assert started.metric("artifact_info", **labels) == 1
        assert started.metric("reloads_total", outcome="ok") == 2
        assert started.metric("requests_total", outcome="ok") == started.metric("request_seconds_count") == 2
        assert started.metric("requests_total", outcome="overloaded") == 1


def test_slow_bodies_have_a_place_in_the_queue(published: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise clients could fill the memory with bodies that wait outside of the queue, or keep places for ever."""
    monkeypatch.setattr(model_server, "READ_S", 3.0)
    with serving(published, queue=1) as started, contextlib.ExitStack() as held:
        wait_until(lambda: started.serves(1), "version 1 serves")
        slow = [held.enter_context(socket.create_connection((LOOPBACK, int(started.url.rpartition(":")[2])))) for _ in range(2)]
        for client in slow:
            client.sendall(b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        wait_until(lambda: started.metric("queue_length") == 1, "both have a place")
        assert started.predict(json_of(X)).status_code == 503
        slow.pop().close()
        wait_until(lambda: started.predict(json_of(X)).status_code == 200, "the place of a client that has left is free")
        assert slow[0].recv(100).startswith(b"HTTP/1.1 408")
        assert started.metric("requests_total", outcome="invalid") == 2


def test_changes_of_other_classes_load_nothing(store: Store, portable: Frozen, tmp_path: Path) -> None:
    with serving(store) as started:
        wait_until(lambda: started.serves(1), "version 1 serves")
        assert started.server.loaded is not None
        model = started.server.loaded.model
        version, other = store.version("mlp"), {"portable": other_artifact(portable, tmp_path / "other")}
        store.publish("mlp", source_key=version.source_key, artifacts=other, carried=version.images)
        wait_until(lambda: started.serves(2), "version 2 is named")
        assert started.server.loaded.model is model
        assert started.metric("reloads_total", outcome="ok") == 1


def test_a_class_of_an_earlier_source_serves(store: Store, portable: Frozen, tmp_path: Path) -> None:
    """Only `latest` contains it, not the newest version itself."""
    other = {"portable": other_artifact(portable, tmp_path / "other")}
    store.publish("mlp", source_key="another", artifacts=other, carried={})
    assert HERE not in store.version("mlp:2").images
    with serving(store) as started:
        wait_until(lambda: started.serves(2), "the artifact of version 1 serves")
        assert started.predict(json_of(X)).status_code == 200


def test_a_failed_canary_is_not_repeated_at_every_look(store: Store, scripted: Frozen, tmp_path: Path) -> None:
    with serving(store, reload_s=0.1) as started:
        wait_until(lambda: started.serves(1), "version 1 serves")
        publish(store, wrong_artifact(scripted, tmp_path / "wrong"))
        wait_until(lambda: started.metric("canary_failures_total") == 1, "the canary has run")
        time.sleep(1)
        assert started.metric("canary_failures_total") == 1
        publish(store, other_artifact(scripted, tmp_path / "other"))
        wait_until(lambda: started.serves(3), "version 3 serves")


def test_keys_require_signatures_of_every_version(store: Store, scripted: Frozen, tmp_path: Path) -> None:
    private, public = make_pair(tmp_path, "own")

    def sign() -> None:
        store.sign(store.version("mlp"), HERE, private)

    with serving(store, keys=(public,)) as started:
        wait_until(lambda: started.metric("reloads_total", outcome="failed"), "it has tried to load")
        assert f"unsigned: got no signature, expected one of mlp:1 for {HERE}" in started.get("/ready").json()["detail"]
        sign()
        wait_until(lambda: started.serves(1), "the signed version serves")
        publish(store, other_artifact(scripted, tmp_path / "other"))
        failed = started.metric("reloads_total", outcome="failed")
        wait_until(lambda: started.metric("reloads_total", outcome="failed") > failed, "it has refused version 2")
        assert started.serves(1)
        sign()
        wait_until(lambda: started.serves(2), "version 2 serves")
    with pytest.raises(UsageError, match=r"own\.key: .*expected a public EC key"):
        ModelServer(ServingOptions(model="mlp", store=store.uri, keys=(private,)))


def test_a_bucket_may_fail_or_be_damaged(
    bucket: str,
    s3_address: str,
    scripted: Frozen,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What serves goes on while the bucket cannot be reached and after a damaged version, until a good one is published."""
    monkeypatch.setattr("freezer.files.buckets.ATTEMPTS", 2)
    with Wire(s3_address) as wire:
        monkeypatch.setenv("AWS_ENDPOINT_URL", wire.address)
        store = Store.open(bucket)
        publish(store, scripted.artifact)
        with serving(store) as started:
            wait_until(lambda: started.serves(1), "version 1 serves")
            wire.is_cut = True
            wait_until(lambda: started.metric("reloads_total", outcome="failed"), "the bucket cannot be reached")
            assert started.serves(1)
            assert started.predict(json_of(X)).status_code == 200
            damaged = wrong_artifact(scripted, tmp_path / "damaged")
            golden = damaged.file(GOLDEN_OUTPUTS)
            path = f"{bucket.removeprefix('s3://')}/mlp/blobs/sha256/{golden.digest.removeprefix('sha256:')}"
            overwrite(s3_address, path, bytes(golden.size_bytes))  # which publish keeps, since its size is right
            wire.restore()
            publish(store, damaged)
            wait_until(lambda: f"s3://{path} is sha256:" in caplog.text, "it has tried version 2")
            assert started.serves(1)
            publish(store, other_artifact(scripted, tmp_path / "other"))
            wait_until(lambda: started.serves(3), "version 3 serves")
            assert started.metric("canary_failures_total") == 0
            used = {item.digest.removeprefix("sha256:") for item in store.manifest(store.version("mlp"), HERE).contents}
            cache, manifest = cache_folder() / "blobs" / "sha256", scripted.artifact.manifest
            earlier = {item.digest.removeprefix("sha256:") for item in manifest.contents} - used
            assert earlier, "the versions share every file"
            assert not any((cache / name).exists() for name in earlier), "the cache grows with every version"


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
        model="mlp", STORE=published.uri, HOST=LOOPBACK, PORT=str(port), THREADS="1", OPTIONS=f"--device-class {HERE} --queue 4"
    )
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            wait_until(lambda: is_ready(port), "the service is ready")
            with socket.create_connection((LOOPBACK, port), timeout=60) as client:
                client.sendall(b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body[:10])
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
    """Whether the node affinity of a pod allows a node with these labels, all of which are `true`."""
    (term,) = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return all((item["key"] in labels) == (item["operator"] == "In") for item in term["matchExpressions"])


def parse(words: list[str]) -> None:
    """Parse a command line of the service; the test fails if it is wrong."""
    program = typer.Typer()
    program.command()(main)
    typer.main.get_command(program).make_context("service", words)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is missing: install it (Debian: apt-get install systemd)")
    text = (SERVING / "coldpress-serve@.service").read_text().replace("/opt/coldpress/.venv/bin/python", sys.executable)
    unit = tmp_path / "coldpress-serve@mlp.service"
    unit.write_text(text)
    done = subprocess.run([program, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_kill_9_loses_only_requests_in_flight(published: Store) -> None:
    """Eight clients load a process that is killed, and started again as systemd would; until it is ready, it refuses them."""
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
        load = asyncio.run(load_url(f"http://{LOOPBACK}:{port}/predict", save({"x": X}), BINARY, concurrency=8, seconds=20))
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
    """Clients that keep their connections get answers on them until the end, and cannot connect again."""
    port = free_port()
    process = start_service("mlp", published.uri, port, "--device-class", HERE)
    ending = threading.Timer(3, process.terminate)
    ending.start()
    load = asyncio.run(load_url(f"http://{LOOPBACK}:{port}/predict", save({"x": X}), BINARY, concurrency=8, seconds=6))
    assert process.wait(30) == 0
    assert set(load.statuses) == {200}
    assert load.statuses[200] > 100


@pytest.mark.slow
def test_load_is_answered_or_refused(published: Store) -> None:
    """With room in the queue all requests are answered; without, the others are refused, and none fails."""
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
    application["args"] |= {"model": "mlp", "store": published.uri, "threads": 1, "replicas": {HERE: 1, "portable": 1}}
    config |= {"http_options": {"host": LOOPBACK, "port": port}, "proxy_location": "HeadOnly"}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    with RayCluster(tmp_path / "cluster") as cluster:
        cluster.start(num_cpus=2, classes=[HERE])
        cluster.start(num_cpus=2)
        with cluster.popen([str(Path(sys.executable).with_name("serve")), "run", str(tmp_path / "serve.yaml")]) as driver:
            try:
                url = f"http://{LOOPBACK}:{port}/resnet50"
                wait_until(lambda: can_connect(port) and requests.get(url, timeout=60).ok, "the application answers", 180)
                contracts = [requests.get(url, timeout=60).json() for _ in range(40)]
                assert {item["device_class"] for item in contracts} == {HERE, "portable"}
                expected = freezer.load("mlp", store=published.uri, device_class=HERE)(X)
                for body, media_type in ((json_of(X), JSON), (save({"x": X}), BINARY)):
                    answer = requests.post(url, data=body, headers={"content-type": media_type}, timeout=60)
                    found = answer.json()["output"] if media_type == JSON else load(answer.content)["output"]
                    torch.testing.assert_close(torch.as_tensor(found), expected)
                wrong = requests.post(url, data=json_of(X[:, :3]), timeout=60)
                assert wrong.status_code == 422
                assert "got shape [2, 3]" in wrong.json()["detail"]
            finally:
                driver.send_signal(signal.SIGINT)
                driver.communicate(timeout=60)
