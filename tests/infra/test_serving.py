"""The HTTP service in a thread: what it answers, and how it follows its store."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import requests
import torch
from safetensors.torch import load, save

import freezer
from freezer.errors import ContractError
from freezer.files import cache_folder
from freezer.runtime.tensors import to_array
from freezer.store import Store
from infra.serving import model_server
from infra.serving.bodies import BINARY, BODY_BYTES, JSON, write_json
from tests.conftest import Frozen
from tests.support.buckets import Wire
from tests.support.keys import make_pair
from tests.support.raylets import LOOPBACK, wait_until
from tests.support.served import Held, Service, serving
from tests.support.services import X, json_of, publish, with_golden
from tests.support.steps import HERE, copy_of
from tests.support.wrong_inputs import TENSOR_FILES


@pytest.fixture(scope="module")
def service(published: Store) -> Iterator[Service]:
    with serving(published, reload_s=60) as found:
        found.wait_for_version(1)
        yield found


def test_answers_equal_those_of_the_loaded_model(service: Service, published: Store) -> None:
    expected = freezer.load("mlp", store=published.uri, device_class=HERE)(X)
    as_json, as_file = service.predict(json_of(X)), service.predict(save({"x": X}), BINARY)
    assert torch.equal(torch.tensor(as_json.json()["output"]), expected)
    assert torch.equal(load(as_file.content)["output"], expected)
    assert (as_json.headers["content-type"], as_file.headers["content-type"]) == (JSON, BINARY)
    contract = service.get("/contract").json()
    assert [item["name"] for item in contract["inputs"]["inputs"]] == ["x"]
    assert [item["name"] for item in contract["outputs"]] == ["output"]


@pytest.mark.parametrize(
    ("body", "media_type"),
    [
        *((content, BINARY) for content in TENSOR_FILES.values()),
        (json_of(X[:, :3]), JSON),
        (b'{"x": [[1, 2, 3, 4], [1]]}', JSON),
        (b"{}", JSON),
        (b"\xff{", JSON),
        (b'{"self": [[1, 2, 3, 4]]}', JSON),
        (b'{"x": [[%s, 2, 3, 4]]}' % (b"9" * 400), JSON),
        (b'{"x": [[%s, 2, 3, 4]]}' % (b"9" * 5000), JSON),
        (b'{"x": [[null, NaN, 3, 4]]}', JSON),
        (b'{"x": "\\ud800"}', JSON),
        (b"[" * 100_000, JSON),
        (b'{"x": %s}' % (b"[" * 100 + b"1" + b"]" * 100), JSON),
        (json_of(X) + b" " * (BODY_BYTES + 64 * 16), JSON),
    ],
)
def test_wrong_input_gets_422(service: Service, body: bytes, media_type: str) -> None:
    before = service.metric("requests_total", outcome="invalid")
    answer = service.predict(body, media_type)
    assert answer.status_code == 422
    detail = answer.json()["detail"]
    assert (detail.startswith("CP-CONTRACT: "), "\n" in detail) == (True, False), detail
    assert service.metric("requests_total", outcome="invalid") == before + 1


def test_complex_outputs_need_binary_bodies() -> None:
    with pytest.raises(ContractError):
        write_json({"x": to_array(X.to(torch.complex64))})


def test_unready_until_an_artifact_has_loaded(scripted: Frozen, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    with serving(store) as started:
        started.wait_for("reloads_total", outcome="failed")
        for answer in (
            started.get("/ready"),
            started.get("/contract"),
            started.predict(json_of(X)),
            started.get("/v2/health/ready"),
            started.get("/v2/models/mlp/ready"),
            requests.post(f"{started.url}/v2/models/mlp/infer", data=b"{}", timeout=60),
        ):
            assert answer.status_code == 503
            assert "mlp:latest is not in store" in answer.text
        assert started.get("/live").status_code == 200
        publish(store, with_golden(scripted.artifact, tmp_path / "wrong", error=1.0))
        started.wait_for("canary_failures_total")
        assert started.get("/ready").status_code == 503
        publish(store, with_golden(scripted.artifact, tmp_path / "other", error=0.0))
        started.wait_for_version(2)
        assert started.predict(json_of(X)).status_code == 200


def test_stateful_models_are_refused(scripted: Frozen, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    publish(store, copy_of(scripted.artifact, tmp_path / "stateful", stateful=True))
    with serving(store) as started:
        started.wait_for("reloads_total", outcome="failed")
        assert "it keeps state between calls" in started.get("/ready").json()["detail"]


def test_a_reload_and_a_full_queue_lose_nothing(
    store: Store, scripted: Frozen, tmp_path: Path
) -> None:
    """One request runs and one waits; a third is refused.

    Meanwhile a new version is loaded, and one with a wrong canary is not.
    """
    with serving(store, queue=1) as started, ThreadPoolExecutor() as clients:
        started.wait_for_version(1)
        assert started.server.loaded is not None
        held = Held(started.server.loaded.model)
        started.server.watched.loaded = replace(started.server.loaded, model=held)
        running = clients.submit(started.predict, json_of(X))
        assert held.entered.wait(60)
        waiting = clients.submit(started.predict, json_of(X))
        wait_until(lambda: started.metric("queue_length") == 1, "a request waits")
        refused = started.predict(json_of(X))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        publish(store, with_golden(scripted.artifact, tmp_path / "other", error=0.0))
        started.wait_for_version(2)
        publish(store, with_golden(scripted.artifact, tmp_path / "wrong", error=1.0))
        started.wait_for("canary_failures_total")
        assert started.serves(2)
        held.released.set()
        assert [running.result().status_code, waiting.result().status_code] == [200, 200]
        info = store.version("mlp:2").images[HERE]
        labels = {"model": "mlp", "version": "2", "device_class": HERE, "digest": info.digest}
        assert started.metric("artifact_info", **labels) == 1
        assert started.metric("reloads_total", outcome="ok") == 2
        assert (
            started.metric("requests_total", outcome="ok")
            == started.metric("request_seconds_count")
            == 2
        )
        assert started.metric("requests_total", outcome="overloaded") == 1


def test_slow_bodies_have_a_place_in_the_queue(
    published: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise clients could fill the memory with bodies that wait outside of the queue, or keep
    places for ever.
    """
    monkeypatch.setattr(model_server, "READ_S", 3.0)
    with serving(published, queue=1) as started, contextlib.ExitStack() as held:
        started.wait_for_version(1)
        slow = [
            held.enter_context(
                socket.create_connection((LOOPBACK, int(started.url.rpartition(":")[2])))
            )
            for _ in range(2)
        ]
        for client in slow:
            client.sendall(b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        wait_until(lambda: started.metric("queue_length") == 1, "both have a place")
        assert started.predict(json_of(X)).status_code == 503
        slow.pop().close()
        wait_until(
            lambda: started.predict(json_of(X)).status_code == 200,
            "the place of a client that has left is free",
        )
        assert slow[0].recv(100).startswith(b"HTTP/1.1 408")
        assert started.metric("requests_total", outcome="invalid") == 2


def test_changes_of_other_classes_load_nothing(
    store: Store, portable: Frozen, tmp_path: Path
) -> None:
    with serving(store) as started:
        started.wait_for_version(1)
        assert started.server.loaded is not None
        model = started.server.loaded.model
        version, other = (
            store.version("mlp"),
            [with_golden(portable.artifact, tmp_path / "other", error=0.0)],
        )
        store.publish("mlp", source_key=version.source_key, artifacts=other, carried=version.index)
        started.wait_for_version(2)
        assert started.server.loaded.model is model
        assert started.metric("reloads_total", outcome="ok") == 1


def test_the_second_image_of_a_class_is_followed(scripted: Frozen, tmp_path: Path) -> None:
    """The first needs an engine, which cannot open it."""
    store = Store.open(str(tmp_path / "store"), create=True)
    payloads = tuple(
        replace(payload, kind="onnxruntime") for payload in scripted.artifact.manifest.payloads
    )
    first = copy_of(scripted.artifact, tmp_path / "first", payloads=payloads)
    other = with_golden(scripted.artifact, tmp_path / "other", error=0.0)
    store.publish("mlp", source_key="a", artifacts=[first, scripted.artifact])
    with serving(store) as started:
        started.wait_for_version(1)
        store.publish("mlp", source_key="b", artifacts=[first, other])
        started.wait_for_version(2)
        assert started.metric("reloads_total", outcome="ok") == 2
        second = store.version("mlp:2").images_of(HERE)[1]
        assert started.metric("artifact_info", digest=second.digest) == 1


@pytest.mark.parametrize("serves", [True, False])
def test_damaged_artifact_is_loaded_once(scripted: Frozen, tmp_path: Path, serves: bool) -> None:
    """Also while nothing serves; other digests are loaded at once."""
    store = Store.open(str(tmp_path / "store"), create=True)
    if serves:
        publish(store, scripted.artifact)
    with serving(store, reload_s=0.1) as started:
        if serves:
            started.wait_for_version(1)
        payloads = tuple(
            replace(payload, kind="exported") for payload in scripted.artifact.manifest.payloads
        )
        publish(store, copy_of(scripted.artifact, tmp_path / "broken", payloads=payloads))
        wait_until(lambda: ": does_not_open: " in started.server.problem or serves, "it has tried")
        wait_until(lambda: started.metric("reloads_total", outcome="failed") > 0, "it has failed")
        failed = started.metric("reloads_total", outcome="failed")
        time.sleep(1)
        assert started.metric("reloads_total", outcome="failed") == failed
        publish(store, with_golden(scripted.artifact, tmp_path / "other", error=0.0))
        started.wait_for_version(2 + serves)


def test_keys_require_signatures_of_every_version(
    store: Store, scripted: Frozen, tmp_path: Path
) -> None:
    private, public = make_pair(tmp_path, "own")

    def sign() -> None:
        store.sign(store.version("mlp"), HERE, private)

    with serving(store, keys=(public,)) as started:
        started.wait_for("reloads_total", outcome="failed")
        assert (
            f"unsigned: got no signature, expected a signature of mlp:1 for {HERE}"
            in started.get("/ready").json()["detail"]
        )
        sign()
        started.wait_for_version(1)
        publish(store, with_golden(scripted.artifact, tmp_path / "other", error=0.0))
        failed = started.metric("reloads_total", outcome="failed")
        wait_until(
            lambda: started.metric("reloads_total", outcome="failed") > failed,
            "it has refused version 2",
        )
        assert started.serves(1)
        sign()
        started.wait_for_version(2)


def test_a_bucket_may_fail(
    bucket: str,
    s3_address: str,
    scripted: Frozen,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What serves goes on while the bucket cannot be reached."""
    monkeypatch.setattr("freezer.files.buckets.ATTEMPTS", 2)
    with Wire(s3_address) as wire:
        monkeypatch.setenv("AWS_ENDPOINT_URL", wire.address)
        store = Store.open(bucket)
        publish(store, scripted.artifact)
        with serving(store) as started:
            started.wait_for_version(1)
            wire.is_cut = True
            started.wait_for("reloads_total", outcome="failed")
            assert started.serves(1)
            assert started.predict(json_of(X)).status_code == 200
            wire.restore()
            publish(store, with_golden(scripted.artifact, tmp_path / "other", error=0.0))
            started.wait_for_version(2)
            used = {
                item.digest.removeprefix("sha256:")
                for item in store.manifest(store.version("mlp"), HERE).contents
            }
            cache, manifest = cache_folder() / "blobs" / "sha256", scripted.artifact.manifest
            earlier = {item.digest.removeprefix("sha256:") for item in manifest.contents} - used
            assert earlier, "the versions share every file"
            assert not any((cache / name).exists() for name in earlier), (
                "the cache grows with every version"
            )


def test_a_canary_answers_its_keys(store: Store, scripted: Frozen, tmp_path: Path) -> None:
    publish(store, with_golden(scripted.artifact, tmp_path / "second", error=0.0))
    store.promote("mlp:1", "prod")
    store.promote("mlp:2", "prod-canary", share=0.5)
    keys = [f"user-{index}" for index in range(20)]
    with serving(store, "mlp:prod") as started:
        started.wait_for_version(1)
        wait_until(lambda: started.server._canary is not None, "the canary is followed")
        wait_until(lambda: started.metric("reloads_total", outcome="ok") == 2, "it is loaded")
        wait_until(lambda: started.server._share == 0.5, "its share is known")

        def version(key: str | None) -> str:
            chosen = started.server.chosen(key)
            assert chosen is not None
            return chosen.labels["version"]

        expected = {key: str(store.version("mlp:prod", key).number) for key in keys}
        assert {key: version(key) for key in keys} == expected
        assert (set(expected.values()), version(None)) == ({"1", "2"}, "1")
        answer = requests.post(
            f"{started.url}/predict",
            data=json_of(X),
            headers={"content-type": JSON, "coldpress-key": "user-1"},
            timeout=60,
        )
        assert answer.status_code == 200
        store.promote("mlp", "prod-canary", remove=True)
        wait_until(lambda: started.server._canary is None, "the canary has ended")
        assert {version(key) for key in keys} == {"1"}


def test_the_sentinel_is_exported(published: Store) -> None:
    with serving(published, reload_s=60) as started:
        started.wait_for_version(1)
        loaded = started.server.loaded
        assert loaded is not None
        sentinel = loaded.sentinel
        assert sentinel is not None
        wait_until(lambda: sentinel.is_ready, "the portable program is loaded")

        def checked() -> bool:
            return started.predict(json_of(X)).ok and started.metric("num_checks") > 0

        wait_until(checked, "a call is checked")
        assert started.metric("error_ratio") <= 1
    with serving(published, reload_s=60, sentinel=False) as without:
        without.wait_for_version(1)
        assert without.metric("error_ratio") != without.metric("error_ratio")
