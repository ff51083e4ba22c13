"""A frozen model that answers requests one at a time, and follows its store. Used by service.py and
serve_app.py.

A new artifact is loaded beside the one that serves, verified by its canary, and swapped in by one
assignment; a request that runs finishes with the old one. If a load fails, what serves stays, and a
later check of the store tries again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from starlette.requests import ClientDisconnect

import freezer
from freezer.artifact import Manifest, read_keys
from freezer.codec import encode
from freezer.errors import (
    ColdpressError,
    ContractError,
    IncompatibleError,
    Refusal,
    UsageError,
    first_line,
)
from freezer.hardware import detect
from freezer.hardware import device_class as class_named
from freezer.runtime.contract import OpenModel
from freezer.runtime.tensor_files import array_bytes
from freezer.store import Store, Version
from infra.serving.bodies import (
    read_body,
    read_json,
    read_safetensors,
    write_json,
)

JSON, BINARY = "application/json", "application/octet-stream"

READ_S = 60.0
"""Time limit for the body of a request, which has its place in the queue while the client sends it.
"""

AGAIN_S = 300.0
"""Time between two loads of artifacts that did not open or failed their canary, while another
serves: they take the CPUs of the requests.
"""

AGAIN_ALONE_S = 30.0
"""The same while nothing serves."""

REMEMBERED = ("canary", "does_not_open", "tampered")  # refusals that stay while the digests do

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

logger = logging.getLogger("coldpress")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingOptions:
    """What to serve. Further fields as in `freezer.load`.

    Attributes:
        model: `MODEL`, or `MODEL:VERSION` to stay with that version.
        store: its URI.
        device_class: load only this class; with `auto` a lesser class serves where the best is
            refused.
        keys: files of trusted public keys.
        queue: requests that may wait while one runs, those included whose body arrives; further
            ones are refused.
        reload_s: seconds between two checks of the store.
    """

    model: str
    store: str
    device_class: str = "auto"
    threads: int | None = None
    min_version: int = 0
    keys: tuple[Path, ...] = ()
    queue: int = 32
    reload_s: float = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What serves.

    Attributes:
        model: the frozen model, which returns numpy arrays.
        offered: digests of the artifacts that it was chosen from, by device class.
        labels: model, version, digest and device class, as `coldpress list` prints them.
    """

    model: Any
    offered: Mapping[str, str]
    labels: Mapping[str, str]


class ServingMetrics:
    """The metrics of one server.

    Args:
        queue_length: returns the number of requests that wait.
    """

    def __init__(self, queue_length: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        prefix, own = "coldpress_serving", self.registry
        text = (
            "Time from the end of a request's body to its answer, of requests that were answered"
            " with outputs"
        )
        self.seconds = Histogram(f"{prefix}_request_seconds", text, buckets=BUCKETS_S, registry=own)
        self.requests = Counter(
            f"{prefix}_requests", "Requests by outcome", ["outcome"], registry=own
        )
        Gauge(
            f"{prefix}_queue_length", "Requests that wait for the model", registry=own
        ).set_function(queue_length)
        self.reloads = Counter(
            f"{prefix}_reloads",
            "Attempts to load an artifact, the first included",
            ["outcome"],
            registry=own,
        )
        self.canary_failures = Counter(
            f"{prefix}_canary_failures", "Artifacts refused by their canary", registry=own
        )
        self.artifact = Info(f"{prefix}_artifact", "The artifact that serves", registry=own)
        for outcome in ("ok", "invalid", "overloaded", "error"):
            self.requests.labels(outcome)
        for outcome in ("ok", "failed"):
            self.reloads.labels(outcome)


class ModelServer:
    """A model, kept up to date with its store.

    Attributes:
        loaded: what serves; None before the first artifact has passed its canary.
        problem: why nothing serves yet.
        metrics: of this server.

    Raises:
        UsageError: the device class is unknown, or a key cannot be read.
        StoreUnreachableError: the store cannot be opened.
    """

    def __init__(self, options: ServingOptions) -> None:
        if options.device_class != "auto":
            class_named(options.device_class)
        read_keys(options.keys)
        self._options, self._store = options, Store.open(options.store)
        self._classes = (
            detect().classes if options.device_class == "auto" else (options.device_class,)
        )
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="coldpress-serving")
        self._num_requests = 0
        self._refused: Mapping[str, str] = {}
        self._again = 0.0
        self.loaded: Loaded | None = None
        self.problem = f"{options.model} is being loaded"
        self.metrics = ServingMetrics(lambda: max(0, self._num_requests - 1))

    async def watch(self) -> None:
        """Load the model, and from then on what the store offers instead."""
        while True:
            await asyncio.to_thread(self.refresh)
            await asyncio.sleep(self._options.reload_s)

    def refresh(self) -> None:
        """Load what the store offers, unless it serves already.

        Errors are logged and counted; what serves stays.
        """
        try:
            self._refresh()
        except Exception as error:  # a payload may raise anything
            self.metrics.reloads.labels("failed").inc()
            problem = f"{self._options.model} cannot be loaded: {first_line(error)}"
            if self.loaded is None:
                self.problem = problem
            logger.warning(problem, exc_info=not isinstance(error, ColdpressError))

    def _refresh(self) -> None:
        version, before = self._store.version(self._options.model), self.loaded
        offered = {
            name: " ".join(image.digest for image in version.images_of(name))
            for name in self._classes
            if name in version.images
        }
        if before is not None and offered == before.offered:
            if before.labels["version"] != str(version.number):  # only other classes changed
                self._serve(replace(before, labels=_labels(version, before.model.manifest)))
            return
        if offered == self._refused and time.monotonic() < self._again:
            return
        try:
            model = self._load()
        except IncompatibleError as error:
            self._count_canary(error.ladder)
            if any(item.reason in REMEMBERED for item in error.ladder):
                wait_s = AGAIN_ALONE_S if before is None else AGAIN_S
                self._refused, self._again = offered, time.monotonic() + wait_s
            raise
        assert model.manifest is not None, "of an artifact"
        self._count_canary(model.ladder)
        self.metrics.reloads.labels("ok").inc()
        self._serve(Loaded(model=model, offered=offered, labels=_labels(version, model.manifest)))
        if before is not None:
            used = {item.digest for item in model.manifest.contents}
            self._store.drop_copies(
                item.digest for item in before.model.manifest.contents if item.digest not in used
            )

    def _load(self) -> OpenModel:
        options = self._options
        model = freezer.load(
            # not the version's number: only `latest` has what still serves a class of an earlier
            # source
            options.model,
            store=options.store,
            device_class=options.device_class,
            threads=options.threads,
            trusted_keys=options.keys,
            min_version=options.min_version,
            arrays="numpy",
        )
        if model.manifest is not None and model.manifest.stateful:
            raise UsageError(
                "it keeps state between calls, which requests of all clients would share; load it"
                " in the client instead"
            )
        return model

    def _serve(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.metrics.artifact.info(dict(loaded.labels))
        logger.info(
            "%s serves", ", ".join(f"{name} {value}" for name, value in loaded.labels.items())
        )

    def _count_canary(self, ladder: Sequence[Refusal]) -> None:
        self.metrics.canary_failures.inc(sum(item.reason == "canary" for item in ladder))

    def contract(self) -> Response:
        """The artifact that serves, its inputs and its outputs; 503 before it is loaded."""
        if self.loaded is None:
            return refusal(503, self.problem)
        model = self.loaded.model
        return JSONResponse(
            {
                **self.loaded.labels,
                "inputs": encode(model.inputs),
                "outputs": [encode(item) for item in model.outputs],
            }
        )

    async def answer(self, chunks: AsyncIterable[bytes], media_type: str) -> Response:
        """Answer a body in its own form: `application/octet-stream` for a .safetensors file, all
        else is JSON.

        Returns:
            200 with the outputs by name; 422 if the inputs violate the contract; 408 if the body
            does not arrive; 503 if the queue is full or nothing is loaded; 500 if the model fails.
        """
        count = self.metrics.requests.labels
        if self.loaded is None or self._num_requests > self._options.queue:
            count("overloaded").inc()
            return refusal(
                503,
                (
                    self.problem
                    if self.loaded is None
                    else f"{self._options.queue} requests are waiting"
                ),
            )
        binary = media_type.startswith(BINARY)
        self._num_requests += 1
        try:
            try:
                async with asyncio.timeout(READ_S):
                    body = await read_body(chunks, self.loaded.model.inputs)
            except (TimeoutError, ClientDisconnect):
                count("invalid").inc()
                return refusal(408, f"the body did not arrive within {READ_S:g} s")
            started = time.perf_counter()
            content = await asyncio.get_running_loop().run_in_executor(
                self._worker, self._call, self.loaded.model, body, binary
            )
        except ContractError as error:
            count("invalid").inc()
            return refusal(422, error.coded)
        except Exception:
            count("error").inc()
            logger.exception("a request failed")
            return refusal(500, "the model failed; the log of the server has the cause")
        finally:
            self._num_requests -= 1
        count("ok").inc()
        self.metrics.seconds.observe(time.perf_counter() - started)
        return Response(content, media_type=BINARY if binary else JSON)

    def _call(self, model: Any, body: bytes, binary: bool) -> bytes:
        """Read the inputs, call the model and write the outputs; payloads release the interpreter's
        lock while they compute.
        """
        read, write = (read_safetensors, array_bytes) if binary else (read_json, write_json)
        leaves = model.leaves(**read(body, model.inputs))
        return write({item.name: leaf for item, leaf in zip(model.outputs, leaves, strict=True)})


def _labels(version: Version, serving: Manifest) -> dict[str, str]:
    images = version.images_of(serving.device_class)
    # an artifact of an earlier release is one image, also where its part for torch alone serves
    image = next((item for item in images if item.engines == serving.engines), images[0])
    return {
        "model": version.model,
        "version": str(version.number),
        "digest": image.digest,
        "device_class": serving.device_class,
    }


def refusal(status: int, detail: str) -> Response:
    """A response without outputs; with 503 the client may try again in a second."""
    return JSONResponse(
        {"detail": detail}, status, headers={"retry-after": "1"} if status == 503 else None
    )
