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
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fastapi import Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from starlette.requests import ClientDisconnect

import freezer
from freezer.artifact import GOLDEN_INPUTS, GOLDEN_OUTPUTS, Manifest, read_keys
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
from freezer.runtime.tensor_files import golden_sets, load_arrays, load_tensors
from freezer.store import Store, Version
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

BUCKETS_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)

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
        max_batch: largest sum of the sizes of requests that are joined into one call; 0: none are.
        max_delay_ms: how long a request waits for others while the model is free.
    """

    model: str
    store: str
    device_class: str = "auto"
    threads: int | None = None
    runtime: Literal["torch", "native"] = "torch"
    min_version: int = 0
    keys: tuple[Path, ...] = ()
    queue: int = 32
    reload_s: float = 30.0
    max_batch: int = 0
    max_delay_ms: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What serves.

    Attributes:
        model: the FrozenModel or NativeModel.
        offered: digests of the artifacts that it was chosen from, by device class.
        labels: model, version, digest and device class, as `coldpress list` prints them.
        shapes: of the outputs, by the golden ones.
        joint: where requests are joined; None: nowhere.
    """

    model: Any
    offered: Mapping[str, str]
    labels: Mapping[str, str]
    shapes: Shapes
    joint: Joint | None


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
        self.joined = Histogram(
            f"{prefix}_batch_requests",
            "Requests in a call, with --max-batch",
            buckets=BUCKETS_REQUESTS,
            registry=own,
        )
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
        model: its name.
        native: whether its arrays are numpy's.
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
        self.native = options.runtime == "native"
        self._num_requests = 0
        self._refused: Mapping[str, str] = {}
        self._again = 0.0
        self.model = options.model.partition("@")[0].partition(":")[0]
        self.loaded: Loaded | None = None
        self.problem = f"{options.model} is being loaded"
        self.metrics = ServingMetrics(lambda: max(0, self._num_requests - 1))
        self._batcher = Batcher(
            self._worker,
            max_size=options.max_batch,
            max_delay_s=options.max_delay_ms / 1e3,
            observe=self.metrics.joined.observe,
        )

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
            shapes, joint = self._shapes_and_joint(version, model)
        except (IncompatibleError, UsageError) as error:
            ladder = getattr(error, "ladder", ())
            self._count_canary(ladder)
            own = isinstance(error, UsageError)  # the model cannot be served so
            if own or any(item.reason in REMEMBERED for item in ladder):
                wait_s = AGAIN_ALONE_S if before is None else AGAIN_S
                self._refused, self._again = offered, time.monotonic() + wait_s
            raise
        self._count_canary(model.ladder)
        self.metrics.reloads.labels("ok").inc()
        loaded = Loaded(
            model=model,
            offered=offered,
            labels=_labels(version, model.manifest),
            shapes=shapes,
            joint=joint,
        )
        self._serve(loaded)
        if before is not None:
            used = {item.digest for item in model.manifest.contents}
            self._store.drop_copies(
                item.digest for item in before.model.manifest.contents if item.digest not in used
            )

    def _load(self) -> Any:
        options = self._options
        load: Callable[..., Any] = freezer.load  # its overloads take one runtime each
        model = load(
            # not the version's number: only `latest` has what still serves a class of an earlier
            # source
            options.model,
            store=options.store,
            device_class=options.device_class,
            threads=options.threads,
            trusted_keys=options.keys,
            min_version=options.min_version,
            runtime=options.runtime,
        )
        if model.manifest.stateful:
            raise UsageError(
                "it keeps state between calls, which requests of all clients would share; load it"
                " in the client instead"
            )
        return model

    def _shapes_and_joint(self, version: Version, model: Any) -> tuple[Shapes, Joint | None]:
        """The shapes of the outputs, and where requests can be joined, if they shall be.

        Raises:
            UsageError: they cannot.
        """
        manifest = model.manifest
        files = {item.path: item for item in manifest.files}
        path = self._store.file(version, files[GOLDEN_OUTPUTS])
        shapes = output_shapes(manifest, path)
        if not self._options.max_batch:
            return shapes, None
        path = self._store.file(version, files[GOLDEN_INPUTS])
        names = [item.name for item in model.inputs.tensors]
        read: Callable[[Path], dict[str, Any]] = load_arrays if self.native else load_tensors
        sets = golden_sets(path, names, len(manifest.golden), read)
        calls = []
        for item, inputs in zip(manifest.golden, sets, strict=True):
            calls.append(GoldenCall(point=item.point, inputs=inputs))
        return shapes, joint_of(model.inputs, shapes, calls, partial(self._outputs, model))

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
        """Answer a body of `POST /predict`, see `respond`."""
        return await self.respond(chunks, OwnForm(media_type, native=self.native))

    async def respond(self, chunks: AsyncIterable[bytes], form: BodyForm) -> Response:
        """Answer a body in its own form.

        Returns:
            200 with the outputs by name; `form.invalid` if the inputs violate the contract; 408 if
            the body does not arrive; 503 if the queue is full or nothing is loaded; 500 if the
            model fails.
        """
        count = self.metrics.requests.labels
        if self.loaded is None or self._num_requests > self._options.queue:
            count("overloaded").inc()
            waiting = f"{self._options.queue} requests are waiting"
            return form.refuse(503, self.problem if self.loaded is None else waiting)
        self._num_requests += 1
        try:
            try:
                async with asyncio.timeout(READ_S):
                    body = await read_body(chunks, self.loaded.model.inputs)
            except (TimeoutError, ClientDisconnect):
                count("invalid").inc()
                return form.refuse(408, f"the body did not arrive within {READ_S:g} s")
            started = time.perf_counter()
            response = await self._answered(self.loaded, body, form)
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
        if loaded.joint is None:
            return await loop.run_in_executor(self._worker, self._call, loaded, body, form)
        inputs = await asyncio.to_thread(form.read, body, model)
        call = partial(self._outputs, model)
        outputs = await self._batcher.answer(call, loaded.joint, inputs)
        return await asyncio.to_thread(form.write, outputs, loaded.labels)

    def _call(self, loaded: Loaded, body: bytes, form: BodyForm) -> Response:
        """Read the inputs, call the model and write the outputs; torch releases the interpreter's
        lock while it computes.
        """
        outputs = self._outputs(loaded.model, form.read(body, loaded.model))
        return form.write(outputs, loaded.labels)

    def _outputs(self, model: Any, inputs: Arrays) -> dict[str, Any]:
        """The outputs of the model by name."""
        leaves = model.leaves(**inputs) if self.native else _tensors(model, inputs)
        return {item.name: leaf for item, leaf in zip(model.outputs, leaves, strict=True)}


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


def _tensors(model: Any, inputs: Mapping[str, Any]) -> list[Any]:
    """The output tensors of a FrozenModel, on the CPU."""
    from torch import Tensor

    from freezer.runtime.tensors import leaves_of

    given = {
        name: value.to(model.device) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    return [leaf.cpu() for leaf in leaves_of(model(**given))]
