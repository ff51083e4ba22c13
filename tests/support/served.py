"""The HTTP service in a thread of a test's process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import requests

from freezer.store import Store
from infra.serving.bodies import JSON
from infra.serving.http_server import http_server
from infra.serving.model_server import ModelServer, ServingOptions
from tests.support.raylets import LOOPBACK, free_port, wait_until
from tests.support.scrapes import scraped
from tests.support.steps import HERE


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service in a thread of this process."""

    url: str
    server: ModelServer

    def predict(self, body: bytes, media_type: str = JSON) -> requests.Response:
        return requests.post(
            f"{self.url}/predict", data=body, headers={"content-type": media_type}, timeout=60
        )

    def get(self, path: str) -> requests.Response:
        return requests.get(f"{self.url}{path}", timeout=60)

    def metric(self, name: str, **labels: str) -> float:
        """A value of GET /metrics."""
        samples = scraped(int(self.url.rpartition(":")[2]))
        (value,) = [
            sample.value
            for sample in samples
            if sample.name == f"coldpress_serving_{name}"
            and labels.items() <= sample.labels.items()
        ]
        return float(value)

    def wait_for(self, name: str, **labels: str) -> None:
        """Wait until a metric is above 0."""
        wait_until(lambda: self.metric(name, **labels), name)

    def wait_for_version(self, version: int) -> None:
        """Wait until a version serves."""
        wait_until(lambda: self.serves(version), f"version {version} serves")

    def serves(self, version: int) -> bool:
        answer = self.get("/ready")
        return answer.status_code == 200 and answer.json()["version"] == str(version)


@contextmanager
def serving(store: Store, model: str = "mlp", **options: Any) -> Iterator[Service]:
    server = ModelServer(
        ServingOptions(
            model=model, store=store.uri, **{"device_class": HERE, "reload_s": 0.1, **options}
        )
    )
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


class Held:
    """A model whose calls wait until they are released."""

    def __init__(self, model: Any) -> None:
        self._model, self.entered, self.released = model, threading.Event(), threading.Event()

    def leaves(self, **inputs: Any) -> Any:
        self.entered.set()
        assert self.released.wait(60)
        return self._model.leaves(**inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
