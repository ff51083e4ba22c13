"""A frozen model that answers requests one at a time, and follows its store. Used by service.py and
serve_app.py.

What serves, and how it is replaced: see `freezer.serving.following`. Where the store has a canary
of the name that it follows, that serves its share of the keys that requests have.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from starlette.requests import ClientDisconnect

from freezer.artifact import GOLDEN_INPUTS, GOLDEN_OUTPUTS, read_keys
from freezer.codec import encode, frozen
from freezer.errors import ColdpressError, ContractError, Refusal
from freezer.hardware import device_class as class_named
from freezer.runtime.tensor_files import golden_sets
from freezer.serving.following import Loaded, WatchedModel
from freezer.serving.process import LoadOptions
from freezer.serving.sentinel import Sentinel
from freezer.store import CANARY, LATEST, Store, Version, in_share
from infra.serving.batching import (
    Arrays,
    Batcher,
    GoldenCall,
    Joint,
    Shapes,
    joint_of,
    output_shapes,
)
from infra.serving.bodies import BodyForm, OwnForm, read_body, refusal

KEY = "coldpress-key"
"""Header with the key that chooses between a version and its canary."""

READ_S = 60.0
"""Time limit for the body of a request, which has its place in the queue while the client sends it.
"""

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

BUCKETS_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)

SENTINEL = {
    "error_ratio": "Error of the last answers against portable, over what is allowed",
    "speed_ratio": "Expected time of a call over its time now",
    "num_checks": "Calls that the portable program answered again",
    "cpu_s": "CPU time of these answers",
}
"""Figures of the sentinel that are exported."""

logger = logging.getLogger("coldpress")


@frozen
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
        sentinel: whether a portable copy checks some calls.
        max_batch: largest sum of the sizes of requests that are joined into one call; 0: none are.
        max_delay_ms: how long a request waits for others while the model is free.
    """

    model: str
    store: str
    device_class: str = "auto"
    threads: int | None = None
    min_version: int = 0
    keys: tuple[Path, ...] = ()
    queue: int = 32
    reload_s: float = 30.0
    sentinel: bool = True
    max_batch: int = 0
    max_delay_ms: float = 0.0


@frozen
class Prepared:
    """What the service knows of a model before it serves.

    Attributes:
        shapes: of the outputs, by the golden ones.
        joint: where requests are joined; None: nowhere.
    """

    shapes: Shapes
    joint: Joint | None


class ServingMetrics:
    """The metrics of one server.

    Args:
        queue_length: returns the number of requests that wait.
        sentinel: returns what checks the calls, whose figures are NaN without one.
    """

    def __init__(
        self,
        queue_length: Callable[[], float],
        sentinel: Callable[[], Sentinel | None] = lambda: None,
    ) -> None:
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
        self.joined = Histogram(
            f"{prefix}_batch_requests",
            "Requests in a call, with --max-batch",
            buckets=BUCKETS_REQUESTS,
            registry=own,
        )
        for name, text in SENTINEL.items():
            figure = partial(_figure, sentinel, name)
            Gauge(f"{prefix}_{name}", text, registry=own).set_function(figure)
        for outcome in ("ok", "invalid", "overloaded", "error"):
            self.requests.labels(outcome)
        for outcome in ("ok", "failed"):
            self.reloads.labels(outcome)


class ModelServer:
    """A model, kept up to date with its store.

    Attributes:
        watched: what serves, and follows the store.
        metrics: of this server.
        model: its name.

    Raises:
        UsageError: the device class is unknown, or a key cannot be read.
        StoreUnreachableError: the store cannot be opened.
    """

    def __init__(self, options: ServingOptions) -> None:
        if options.device_class != "auto":
            class_named(options.device_class)
        read_keys(options.keys)
        self._options, self._store = options, Store.open(options.store)
        self.model = options.model.partition("@")[0].partition(":")[0]
        self.watched = self._follow(options.model)
        self._canary: WatchedModel | None = None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="coldpress-serving")
        self._num_requests, self._share = 0, 0.0
        self.metrics = ServingMetrics(
            lambda: max(0, self._num_requests - 1),
            lambda: self.loaded.sentinel if self.loaded else None,
        )
        self._batcher = Batcher(
            self._worker,
            max_size=options.max_batch,
            max_delay_s=options.max_delay_ms / 1e3,
            observe=self.metrics.joined.observe,
        )

    @property
    def loaded(self) -> Loaded | None:
        """What serves; None before the first artifact has passed its canary."""
        return self.watched.loaded

    @property
    def problem(self) -> str:
        """Why nothing serves yet."""
        return self.watched.problem

    def _follow(self, reference: str) -> WatchedModel:
        options = self._options
        loading = LoadOptions(
            store=options.store,
            device_class=options.device_class,
            threads=options.threads,
            trusted_keys=options.keys,
            min_version=options.min_version,
            arrays="numpy",
        )
        return WatchedModel(reference, loading, sentinel=options.sentinel, prepare=self._prepared)

    def _prepared(self, version: Version, model: Any) -> Prepared:
        """The shapes of the outputs, and where requests can be joined, if they shall be.

        Raises:
            UsageError: they cannot.
        """
        manifest = model.manifest
        files = {item.path: item for item in manifest.files}
        shapes = output_shapes(manifest, self._store.file(version, files[GOLDEN_OUTPUTS]))
        if not self._options.max_batch:
            return Prepared(shapes=shapes, joint=None)
        path = self._store.file(version, files[GOLDEN_INPUTS])
        names = [item.name for item in model.inputs.tensors]
        sets = golden_sets(path, names, len(manifest.golden))
        calls = [
            GoldenCall(point=item.point, inputs=inputs)
            for item, inputs in zip(manifest.golden, sets, strict=True)
        ]
        joint = joint_of(model.inputs, shapes, calls, partial(self._outputs, model))
        return Prepared(shapes=shapes, joint=joint)

    async def watch(self) -> None:
        """Load the model, and from then on what the store offers instead."""
        while True:
            await asyncio.to_thread(self.refresh)
            await asyncio.sleep(self._options.reload_s)

    def refresh(self) -> None:
        """Load what the store offers, unless it serves already.

        Errors are logged and counted; what serves stays.
        """
        self._check(self.watched)
        if self.loaded is not None:
            self.metrics.artifact.info(dict(self.loaded.labels))
        with suppress(ColdpressError):  # it is counted above
            self._refresh_canary()

    def _check(self, watched: WatchedModel) -> None:
        try:
            if not watched.check():
                return
        except Exception as error:
            self.metrics.reloads.labels("failed").inc()
            ladder: Sequence[Refusal] = getattr(error, "ladder", ())
        else:
            self.metrics.reloads.labels("ok").inc()
            ladder = watched.loaded.model.ladder if watched.loaded else ()
        self.metrics.canary_failures.inc(sum(item.reason == "canary" for item in ladder))

    def _refresh_canary(self) -> None:
        """Follow the canary of the name too, while it has a share of the keys."""
        model, _, name = self._options.model.partition(":")
        name = f"{name or LATEST}{CANARY}"
        if "@" in model or name not in self._store.layout(model).tags(name):
            self._share, self._canary = 0.0, None
            return
        share = self._store.notes(model).share(name)
        if share and self._canary is None:
            self._canary = self._follow(f"{model}:{name}")
        if self._canary is not None:
            self._check(self._canary)
        self._share = share

    def chosen(self, key: str | None) -> Loaded | None:
        """What serves a key: the canary for its share of the keys, once it is loaded."""
        model, _, name = self._options.model.partition(":")
        canary = self._canary.loaded if self._canary is not None else None
        if key and canary is not None and in_share(model, name or LATEST, key, self._share):
            return canary
        return self.loaded

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

    async def answer(
        self, chunks: AsyncIterable[bytes], media_type: str, key: str | None = None
    ) -> Response:
        """Answer a body of `POST /predict`, see `respond`."""
        return await self.respond(chunks, OwnForm(media_type), key)

    async def respond(
        self, chunks: AsyncIterable[bytes], form: BodyForm, key: str | None = None
    ) -> Response:
        """Answer a body in its own form. A key chooses between the version that serves and its
        canary.

        Returns:
            200 with the outputs by name; `form.invalid` if the inputs violate the contract; 408 if
            the body does not arrive; 503 if the queue is full or nothing is loaded; 500 if the
            model fails.
        """
        count = self.metrics.requests.labels
        loaded = self.chosen(key)
        if loaded is None or self._num_requests > self._options.queue:
            count("overloaded").inc()
            waiting = f"{self._options.queue} requests are waiting"
            return form.refuse(503, self.problem if loaded is None else waiting)
        self._num_requests += 1
        try:
            try:
                async with asyncio.timeout(READ_S):
                    body = await read_body(chunks, loaded.model.inputs)
            except (TimeoutError, ClientDisconnect):
                count("invalid").inc()
                return form.refuse(408, f"the body did not arrive within {READ_S:g} s")
            started = time.perf_counter()
            response = await self._answered(loaded, body, form)
        except ContractError as error:
            count("invalid").inc()
            return form.refuse(form.invalid, error.coded)
        except Exception:
            count("error").inc()
            logger.exception("a request failed")
            return form.refuse(500, "the model failed; the log of the server has the cause")
        finally:
            self._num_requests -= 1
        count("ok").inc()
        self.metrics.seconds.observe(time.perf_counter() - started)
        return response

    async def _answered(self, loaded: Loaded, body: bytes, form: BodyForm) -> Response:
        """The answer to a body, by one call of the model for it or for several requests."""
        model, loop = loaded.model, asyncio.get_running_loop()
        if loaded.prepared.joint is None:
            return await loop.run_in_executor(self._worker, self._call, loaded, body, form)
        inputs = await asyncio.to_thread(form.read, body, model)
        call = partial(self._watched_outputs, loaded)
        outputs = await self._batcher.answer(call, loaded.prepared.joint, inputs)
        return await asyncio.to_thread(form.write, outputs, loaded.labels)

    def _call(self, loaded: Loaded, body: bytes, form: BodyForm) -> Response:
        """Read the inputs, call the model and write the outputs; torch releases the interpreter's
        lock while it computes.
        """
        outputs = self._watched_outputs(loaded, form.read(body, loaded.model))
        return form.write(outputs, loaded.labels)

    def _watched_outputs(self, loaded: Loaded, inputs: Arrays) -> dict[str, Any]:
        """The outputs of what serves by name; its sentinel sees the call."""
        started = time.perf_counter()
        outputs = self._outputs(loaded.model, inputs)
        if loaded.sentinel is not None:
            loaded.sentinel.saw((), inputs, list(outputs.values()), time.perf_counter() - started)
        return outputs

    def _outputs(self, model: Any, inputs: Arrays) -> dict[str, Any]:
        """The outputs of a model by name."""
        leaves = model.leaves(**inputs)
        return {item.name: leaf for item, leaf in zip(model.outputs, leaves, strict=True)}


def _figure(sentinel: Callable[[], Sentinel | None], name: str) -> float:
    return float(getattr(sentinel(), name, math.nan))
