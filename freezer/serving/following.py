"""Follow a name of a store: serve what it points at, and check a few calls in the background.

A new artifact is loaded beside the one that serves, verified by its canary, and swapped in by one
assignment; calls that run finish with the old one. If a load fails, what serves stays, and a later
check of the store tries again.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from freezer.artifact import Manifest
from freezer.codec import frozen
from freezer.errors import ColdpressError, IncompatibleError, UsageError, first_line
from freezer.hardware import detect
from freezer.serving.load import load
from freezer.serving.process import LoadOptions
from freezer.serving.sentinel import END_S, Sentinel
from freezer.store import Store, Version

AGAIN_S = 300.0
"""Time between two loads of artifacts that did not open or failed their canary, while another
serves: they take the CPUs of the calls.
"""

AGAIN_ALONE_S = 30.0
"""The same while nothing serves."""

REMEMBERED = ("canary", "does_not_open", "tampered")  # refusals that stay while the digests do

logger = logging.getLogger("coldpress")


@frozen
class Loaded:
    """What serves.

    Attributes:
        model: the FrozenModel or NativeModel.
        offered: digests of the artifacts that it was chosen from, by device class.
        labels: model, version, digest and device class, as `coldpress list` prints them.
        sentinel: checks some of its calls; None where it is off.
        prepared: what `prepare` returned.
    """

    model: Any
    offered: Mapping[str, str]
    labels: Mapping[str, str]
    sentinel: Sentinel | None = None
    prepared: Any = None


class WatchedModel:
    """A frozen model that follows its store. Calls of several threads are safe.

    Attributes:
        loaded: what serves; None before the first artifact has passed its canary.
        problem: why the last check of the store loaded nothing; empty if it did not fail.

    Args:
        reference: `MODEL` or `MODEL:NAME`; `MODEL:VERSION` stays with that version.
        options: how to load it.
        sentinel: whether a portable copy checks some calls.
        prepare: called with a version and its loaded model before it serves; where it raises
            UsageError, that model does not serve.

    Raises:
        StoreUnreachableError: the store cannot be opened.
    """

    def __init__(
        self,
        reference: str,
        options: LoadOptions,
        *,
        sentinel: bool = True,
        prepare: Callable[[Version, Any], object] | None = None,
    ) -> None:
        self._reference, self._options, self._sentinel = reference, options, sentinel
        self._prepare = prepare
        self._store = Store.open(options.store or "store")
        wanted = options.device_class
        self._classes = detect().classes if wanted == "auto" else (wanted,)
        self._refused: Mapping[str, str] = {}
        self._again = 0.0
        self._ended = threading.Event()
        self._checking = threading.Lock()
        self._thread: threading.Thread | None = None
        self.loaded: Loaded | None = None
        self.problem = f"{reference} is being loaded"

    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        """The result of what serves; see FrozenModel."""
        loaded = self.loaded
        if loaded is None:
            raise UsageError(self.problem)
        started = time.perf_counter()
        leaves = loaded.model.leaves(*args, **kwargs)
        if loaded.sentinel is not None:
            loaded.sentinel.saw(args, kwargs, leaves, time.perf_counter() - started)
        return loaded.model.result_of(leaves)

    def start(self, every_s: float) -> WatchedModel:
        """Check the store in a thread until `close`, and return this model."""
        self._thread = threading.Thread(target=self._watch, args=(every_s,), daemon=True)
        self._thread.start()
        atexit.register(self.close)
        return self

    def close(self) -> None:
        """End the threads; calls are still answered."""
        atexit.unregister(self.close)
        self._ended.set()
        if self._thread is not None:
            self._thread.join(END_S)
        if self.loaded is not None and self.loaded.sentinel is not None:
            self.loaded.sentinel.close()

    def _watch(self, every_s: float) -> None:
        while not self._ended.wait(every_s):
            with suppress(Exception):  # it is logged
                self.check()

    def check(self) -> bool:
        """Load what the store offers now, unless it serves already. Call it when a name was moved.

        Returns:
            Whether another artifact serves now.

        Raises:
            Exception: of the store, or of the load; what serves stays.
        """
        with self._checking:
            try:
                return self._check()
            except Exception as error:  # a payload may raise anything
                self.problem = f"{self._reference} cannot be loaded: {first_line(error)}"
                logger.warning(self.problem, exc_info=not isinstance(error, ColdpressError))
                raise

    def _check(self) -> bool:
        version, before = self._store.version(self._reference, self._options.key), self.loaded
        offered = self._offered(version)
        if before is not None and offered == before.offered:
            if before.labels["version"] != str(version.number):  # only other classes changed
                self.loaded = replace(before, labels=_labels(version, before.model.manifest))
            self.problem = ""
            return False
        if offered == self._refused and time.monotonic() < self._again:
            return False
        try:
            # by its pin, also if the name moves meanwhile
            self.serve(load(version.pin, self._options), version)
        except (IncompatibleError, UsageError) as error:
            ladder = getattr(error, "ladder", ())
            own = isinstance(error, UsageError)  # the model cannot be served so
            if own or any(item.reason in REMEMBERED for item in ladder):
                wait_s = AGAIN_ALONE_S if before is None else AGAIN_S
                self._refused, self._again = offered, time.monotonic() + wait_s
            raise
        return True

    def _offered(self, version: Version) -> dict[str, str]:
        offered = {}
        for name in self._classes:
            if name in version.images:
                offered[name] = " ".join(image.digest for image in version.images_of(name))
        return offered

    def serve(self, model: Any, version: Version) -> None:
        """Serve a loaded model of a version from now on.

        Raises:
            UsageError: it keeps state between calls.
        """
        if model.manifest.stateful:
            raise UsageError(
                "it keeps state between calls, which another version, or other clients' calls, must"
                " not share; load it without watching where it is called"
            )
        prepared = None if self._prepare is None else self._prepare(version, model)
        before = self.loaded
        self.loaded = Loaded(
            model=model,
            offered=self._offered(version),
            labels=_labels(version, model.manifest),
            sentinel=Sentinel(model, version.pin, self._options) if self._sentinel else None,
            prepared=prepared,
        )
        if before is not None:
            if before.sentinel is not None:
                before.sentinel.close()
            used = {item.digest for item in model.manifest.contents}
            known = {item.digest for item in before.model.manifest.contents}
            self._store.drop_copies(known - used)
        self.problem = ""
        shown = ", ".join(f"{name} {value}" for name, value in self.loaded.labels.items())
        logger.info("%s serves", shown)


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


def follow(
    reference: str,
    options: LoadOptions,
    version: Version,
    model: Any,
    every_s: float,
    sentinel: bool,
) -> WatchedModel:
    """A loaded model that follows its store; see `OpenModel.watch`."""
    watched = WatchedModel(reference, options, sentinel=sentinel)
    watched.serve(model, version)
    return watched.start(every_s)
