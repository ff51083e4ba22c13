"""The tracker in a process of its own, so that neither MLflow's work nor its waiting is the driver's.

    driver: start, log, finish  ->  a queue  ->  a thread, one call at a time  ->  the process: tracker.Tracker

What is logged is final and in the ledger already, so the driver goes on at once, up to AHEAD calls ahead of MLflow. While a judge
runs where the driver stands, no call is passed on. The process ends with its driver, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

from freezer.errors import ColdpressError
from freezer.store.store import Store
from pipeline.records.outcome import Outcome
from pipeline.tracking.connection import preload, resolve
from pipeline.tracking.registry import ArtifactMode
from pipeline.tracking.tracker import Tracker, replay_command
from pipeline.workspace.processes import die_with
from pipeline.workspace.staging import temporary_folder

LOT = 256
"""Outcomes that are handed over together at the end: what pickles thousands at once takes more memory than they do."""

AHEAD = 16
"""Models whose outcomes wait to be logged, until the driver waits too: an interrupt should not take long."""

HOLD = "hold"
"""The call that hands over outcomes for the end."""

LOOK_S = 0.05
"""Between two looks at whether work may go on."""

END_S = 10.0
"""How long the process may take to end when there is nothing more to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Told:
    """What the process answers to each call: the tracker's failures so far, whether it has nothing to log, and what was raised."""

    failures: tuple[str, ...] = ()
    is_complete: bool = False
    error: ColdpressError | None = None


class TrackerProcess:
    """MLflow for one campaign, as `Tracker`, written by another process. Use it as a context manager.

    Args:
        tracking_uri: of MLflow.
        campaign: its name.
        store: URI of the store.
        mode: whether MLflow holds whole artifacts, or references to the store.

    Attributes:
        may_work: whether work is allowed now; asked before each call. To be set before the first one.

    Raises:
        UsageError: the tracking URI is none.
    """

    def __init__(self, tracking_uri: str, campaign: str, store: str, *, mode: ArtifactMode) -> None:
        resolve(tracking_uri)
        self._made_of = (tracking_uri, campaign, store, mode)
        self.may_work: Callable[[], bool] = lambda: True
        self._calls: queue.Queue[tuple[Any, ...] | None] = queue.Queue(maxsize=AHEAD)
        self._told = _Told()
        self._hurries = self._stops = False
        self._temporary = contextlib.ExitStack()
        self._thread = threading.Thread(target=self._pass_on, name="tracker", daemon=True)

    def __enter__(self) -> Self:
        """Start it; it imports MLflow meanwhile."""
        ours, theirs = socket.socketpair()
        with theirs:
            code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({theirs.fileno()}, {os.getpid()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=self._environment()
            )
        self._pipe: Connection[Any, Any] = Connection(ours.detach())
        self._pipe.send(self._made_of)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End it; what was not logged by then is left to the next start, or to a replay."""
        self._stops = self._hurries = True
        self._process.kill()
        self._process.wait(END_S)
        self._put(None)
        self._thread.join()
        self._pipe.close()
        self._temporary.close()

    def _environment(self) -> dict[str, str]:
        """Of the process: its temporary files lie together, so that they are removed though it, or the driver, is killed."""
        with contextlib.suppress(OSError):  # no room for a folder: what is written there later says so
            return {**os.environ, "TMPDIR": str(self._temporary.enter_context(temporary_folder()))}
        return {**os.environ}

    @property
    def failures(self) -> tuple[str, ...]:
        """What went wrong so far, one sentence each; see Tracker."""
        return self._told.failures

    def start(self, catalog: str, started: float, *, expected: str | None = None) -> None:
        """Open MLflow and the campaign's parent run; see Tracker."""
        self._call("start", catalog, started, expected=expected)

    def log(self, outcomes: Sequence[Outcome]) -> None:
        """Log the final outcomes of one model as reached now; see Tracker. Waits only where MLflow is far behind.

        Raises:
            ColdpressError: an earlier call could not be done at all: mlflow is not installed.
        """
        if self._told.is_complete:
            self._check()
        else:
            self._call("log", tuple(outcomes), reached=time.time())

    def finish(self, outcomes: Sequence[Outcome], exit_code: int, *, interrupted: bool, finished: float) -> None:
        """Wait until everything is logged, and write the summary; see Tracker.

        Raises:
            ColdpressError: as of `log`.
        """
        self._hurries = True
        for first in range(0, len(outcomes), LOT):
            self._call(HOLD, tuple(outcomes[first : first + LOT]))
        self._call("finish", exit_code, interrupted=interrupted, finished=finished)
        self._put(None)
        self._thread.join()
        self._check()

    def _call(self, name: str, *args: Any, **named: Any) -> None:
        self._check()
        self._put((name, args, named))

    def _check(self) -> None:
        if self._told.error is not None:
            raise self._told.error

    def _put(self, call: tuple[Any, ...] | None) -> None:
        """Queue a call; none is taken any more once the thread has ended."""
        while self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._calls.put(call, timeout=1)
                break

    def _pass_on(self) -> None:
        """Pass calls on, one at a time, until the last."""
        try:
            while (call := self._calls.get()) is not None and not self._stops:
                while not self._hurries and not self.may_work():
                    time.sleep(LOOK_S)
                self._pipe.send(call)
                self._told = self._pipe.recv()
        except Exception as error:  # whatever it is, MLflow lacks something now, which people must be told
            if not self._stops:
                self._told = _Told(failures=(*self.failures, self._failed(error)))

    def _failed(self, error: Exception) -> str:
        uri, campaign, store, mode = self._made_of
        how = self._died() if isinstance(error, EOFError | OSError) else f"cannot be talked to ({type(error).__name__}: {error})"
        return (
            f"the process that writes to MLflow {how}; the store and the ledger are complete, and "
            f"`{replay_command(uri, campaign, store, mode)}` brings MLflow up to date"
        )

    def _died(self) -> str:
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "does not answer"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def serve(handle: int, parent: int) -> None:
    """Be the process: do what is asked until the other end is closed.

    Args:
        handle: of the socket to the driver.
        parent: the driver's process, with which this one ends.
    """
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the driver, who says what is left to do
        signal.signal(number, signal.SIG_IGN)
    pipe: Connection[Any, Any] = Connection(handle)
    tracking_uri, campaign, store, mode = pipe.recv()
    tracker = Tracker(tracking_uri, campaign, Store.open(store), mode=mode)
    with contextlib.suppress(ModuleNotFoundError):  # the first call will say so
        preload()
    held: list[Outcome] = []
    while True:
        try:
            name, args, named = pipe.recv()
        except EOFError:
            return
        error: ColdpressError | None = None
        try:
            if name == HOLD:
                held.extend(*args)
            else:
                getattr(tracker, name)(*(held,) if name == "finish" else (), *args, **named)
        except ColdpressError as raised:
            error = raised
        pipe.send(_Told(failures=tuple(tracker.failures), is_complete=tracker.is_complete, error=error))
