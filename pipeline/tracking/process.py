"""The tracker in a process of its own, so that MLflow costs the driver neither CPU time nor
waiting.

    driver: start, log, finish  ->  a queue  ->  a thread, one call at a time  ->  the process:
        Tracker

Logged outcomes are in the ledger already, so a crash of the process loses nothing. It is started
with subprocess: multiprocessing would import the driver's main module, and with it Ray, and cannot
tie the process to the life of its driver.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Self

from freezer.errors import ColdpressError, UsageError
from freezer.files import scratch_folder
from freezer.store import Store
from pipeline.ledger import CampaignRecord
from pipeline.records import Outcomes
from pipeline.tracking.connection import preload, resolve
from pipeline.tracking.registry import ArtifactMode
from pipeline.tracking.tracker import Tracker, replay_command
from pipeline.workspace import die_with, is_measured

AHEAD = 16
"""Queued calls, one for each model, before the driver waits; an interrupt waits for them to be
logged.
"""

LOOK_S = 0.05
"""Interval between checks whether work is allowed."""

END_S = 10.0
"""Time for the process to end."""


if TYPE_CHECKING:
    _Pipe = Connection[Any, Any]

_Call = tuple[str, tuple[object, ...]]
"""Name of a method of Tracker, and its arguments."""


class TrackerProcess:
    """`Tracker` in another process. Use it as a context manager.

    Args:
        tracking_uri: URI of MLflow.
        campaign: name.
        store: URI of the store.
        mode: whether MLflow stores whole artifacts, or references to the store.

    Attributes:
        failures, experiment_id: as of `Tracker`, after its last call.

    Raises:
        UsageError: the tracking URI is invalid.
    """

    def __init__(
        self,
        tracking_uri: str,
        campaign: str,
        store: str,
        *,
        mode: ArtifactMode,
    ) -> None:
        resolve(tracking_uri)
        self._arguments = (tracking_uri, campaign, store, mode)
        self._calls: queue.Queue[_Call | None] = queue.Queue(maxsize=AHEAD)
        self.failures: tuple[str, ...] = ()
        self.experiment_id = ""
        self._num_given = self._num_logged = 0
        self._is_complete = False
        self._error: ColdpressError | None = None
        self._hurries = self._stops = False
        self._temporary = ExitStack()
        self._thread = threading.Thread(
            target=self._send_calls,
            name="tracker",
            daemon=True,
        )

    def __enter__(self) -> Self:
        """Start the process, which imports MLflow meanwhile."""
        environment = dict(os.environ)
        # A folder of its own, which is removed even if the process or the driver is killed. On a
        # full disk there is none, and what the process writes reports it.
        with suppress(OSError, UsageError):
            environment["TMPDIR"] = str(self._temporary.enter_context(scratch_folder()))
        ours, theirs = socket.socketpair()
        with theirs:
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve;"
                f" serve({theirs.fileno()}, {os.getpid()})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        self._pipe: _Pipe = Connection(ours.detach())
        self._pipe.send(self._arguments)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the process; the next start or a replay logs the rest."""
        self._stops = self._hurries = True
        self._process.kill()
        self._process.wait(END_S)
        self._put(None)
        self._thread.join()
        self._pipe.close()
        self._temporary.close()

    @property
    def num_logged(self) -> int:
        """Number of outcomes of `log` that MLflow shows. Thread-safe."""
        return self._num_given if self._is_complete else self._num_logged

    @property
    def num_unlogged(self) -> int:
        """Number of outcomes of `log` that MLflow does not show yet, or lacks after a failure.

        Thread-safe.
        """
        return self._num_given - self.num_logged

    def start(self, record: CampaignRecord, expected: str | None = None) -> None:
        """Queue `Tracker.start`."""
        self._call("start", record, expected)

    def log(self, outcomes: Outcomes) -> None:
        """Queue `Tracker.log` for outcomes reached now; wait if AHEAD calls are queued.

        Raises:
            ColdpressError: an earlier call was impossible: mlflow is not installed.
        """
        self._num_given += len(outcomes)
        if self._is_complete:
            self._check()
        else:
            self._call("log", tuple(outcomes), time.time())

    def finish(self, outcomes: Outcomes, record: CampaignRecord, page: bytes = b"") -> None:
        """Wait until everything is logged and `Tracker.finish` is done.

        Raises:
            ColdpressError: as of `log`.
        """
        self._hurries = True
        self._call("finish", tuple(outcomes), record, page)
        self._put(None)
        self._thread.join()
        self._check()

    def _call(self, name: str, *args: object) -> None:
        self._check()
        self._put((name, args))

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _put(self, call: _Call | None) -> None:
        """Queue a call; drop it if the thread has ended."""
        while self._thread.is_alive():
            with suppress(queue.Full):
                self._calls.put(call, timeout=1)
                break

    def _send_calls(self) -> None:
        """Send calls to the process, one at a time, until the last."""
        try:
            while (call := self._calls.get()) is not None and not self._stops:
                # With a full queue, the judge may wait for the driver, which waits for room.
                while not (self._hurries or self._calls.full()) and is_measured():
                    time.sleep(LOOK_S)
                self._pipe.send(call)
                (
                    self.failures,
                    self.experiment_id,
                    self._num_logged,
                    self._is_complete,
                    self._error,
                ) = self._pipe.recv()
        except Exception as error:  # any error leaves MLflow incomplete, and has to be reported
            if not self._stops:
                self.failures = (*self.failures, self._failure(error))

    def _failure(self, error: Exception) -> str:
        how = f"failed ({type(error).__name__}: {error})"
        if isinstance(error, EOFError | OSError):
            how = f"ended with exit code {self._process.wait(END_S)}"
        again = replay_command(*self._arguments)
        return (
            f"the process that writes to MLflow {how}; the store and the ledger are complete, and"
            f" `{again}` brings MLflow up to date"
        )


def serve(handle: int, parent: int) -> None:
    """Execute calls until the driver closes its end.

    Args:
        handle: file descriptor of the socket to the driver.
        parent: process id of the driver; this process ends with it.
    """
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # the driver handles them
        signal.signal(number, signal.SIG_IGN)
    pipe: _Pipe = Connection(handle)
    tracking_uri, campaign, store, mode = pipe.recv()
    tracker = Tracker(tracking_uri, campaign, Store.open(store), mode=mode)
    with suppress(ModuleNotFoundError):  # the first call reports it
        preload()
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            return
        error: ColdpressError | None = None
        try:
            getattr(tracker, name)(*args)
        except ColdpressError as raised:
            error = raised
        pipe.send(
            (
                tuple(tracker.failures),
                tracker.experiment_id,
                tracker.num_logged,
                tracker.is_complete,
                error,
            )
        )
