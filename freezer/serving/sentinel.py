"""The sentinel: answer one call in N again with the portable program, in the background, and
compare; and compare the time of calls with what it was.

N follows from the cost of an answer: all answers together take at most BUDGET of the CPU time of
the threads that serve. Inputs and outputs of these calls are copied.
"""

from __future__ import annotations

import atexit
import copy
import logging
import math
import os
import queue
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from freezer.artifact import GOLDEN_INPUTS
from freezer.compare import distances, structure_problem, tolerance
from freezer.errors import UsageError, first_line
from freezer.files import scratch_folder
from freezer.hardware import PORTABLE, available_cpus
from freezer.serving.canary import golden_inputs, values_of_output
from freezer.serving.process import LoadOptions
from freezer.store import Store

BUDGET = 0.01
"""Share of the CPU time."""

STRIDE = 8
"""One call in so many is looked at, since that takes microseconds."""

WINDOW = 16
"""Calls, of those that are looked at, whose median is compared."""

SLOW = 0.5
"""Speed ratio below which calls are too slow: machines of one class differ by less."""

OVER = 10.0
"""Error, relative to that of golden inputs when the model was loaded, above which an answer is
wrong.
"""

NUM_RATIOS = 8
"""Answers whose greatest error is shown."""

SLACK_S = 1e-4
"""Time that any call may take longer, as after an idle moment."""

MAX_SHAPES = 64
"""Shapes of inputs whose times are known; further ones are not timed."""

END_S = 30.0
"""Longest wait for the last answer or load: a process that exits within an engine aborts."""

NICE = 10
"""Enough to leave the CPUs to calls, and to get 1% of busy ones."""

logger = logging.getLogger("coldpress")


class Sentinel:
    """Checks some calls of a model, from a thread of its own.

    Attributes:
        error_ratio: the greatest error of the last answers, relative to what is allowed; above 1
            the model answers wrongly. NaN before the first.
        speed_ratio: expected time of a call, by the manifest or by the fastest calls so far, over
            its time now; below 0.5 calls are too slow. NaN before the first.
        num_calls, num_checks: calls seen, and answered again.
        cpu_s: CPU time of the answers.
        is_ready, since: whether and when the portable program was loaded.
        problem: why nothing is checked; empty otherwise.

    Args:
        model: the model that serves.
        pin: of its version, which has the portable artifact.
        options: options of its load.
    """

    def __init__(self, model: Any, pin: str, options: LoadOptions) -> None:
        self._model, self._pin, self._options = model, pin, options
        self._threads = options.threads or available_cpus()
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._recent: dict[object, list[float]] = {}
        self._expected: dict[object, float] = {}
        self._usual: list[float] = []
        self._ratios: deque[float] = deque(maxlen=NUM_RATIOS)
        self._cost_s = math.inf
        self.is_ready, self.since = False, 0.0
        self.error_ratio = self.speed_ratio = math.nan
        self.num_calls = self.num_checks = 0
        self.cpu_s = 0.0
        self.problem = ""
        self._thread = threading.Thread(target=self._run, daemon=True, name="coldpress-sentinel")
        device = getattr(model, "device", None)
        if device is not None and device.type != "cpu":
            self.problem = "only calls on CPUs are checked"
        else:
            self._thread.start()
            atexit.register(self.close)

    def close(self) -> None:
        """End the thread."""
        atexit.unregister(self.close)
        self._calls.put(None)
        if self._thread.is_alive():
            self._thread.join(END_S)

    def saw(
        self,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        outputs: Sequence[Any],
        seconds: float,
    ) -> None:
        """Take note of a call, its result and its time. Never raises."""
        self.num_calls += 1
        if self.problem or self.num_calls % STRIDE:
            return
        try:
            self._time(args, kwargs, seconds)
            budget_s = BUDGET * self._threads * (time.perf_counter() - self.since)
            if self._calls.empty() and self.cpu_s + self._cost_s <= budget_s:
                self._cost_s = math.inf  # until this one has ended
                inputs = self._model.named(args, kwargs)
                given = {path: _copy(value) for path, value in inputs.items()}
                self._calls.put((given, list(map(_copy, outputs))))
        except Exception as error:  # whatever a result may be
            self._give_up(error)

    def _time(self, args: tuple[object, ...], kwargs: Mapping[str, object], seconds: float) -> None:
        """Compare the median of some calls with that of the fastest ones of their shape."""
        shape = tuple([getattr(value, "shape", None) for value in (*args, *kwargs.values())])
        if shape not in self._recent and len(self._recent) < MAX_SHAPES:
            self._recent[shape] = []
            self._expected[shape] = self._promised(args, kwargs)
        recent = self._recent.get(shape, [])
        recent.append(seconds)
        if len(recent) == WINDOW:
            median = statistics.median(recent)
            recent.clear()
            self._expected[shape] = min(self._expected[shape], median)
            was_slow = self.speed_ratio < SLOW
            self.speed_ratio = (self._expected[shape] + SLACK_S) / (median + SLACK_S)
            if self.speed_ratio < SLOW and not was_slow:
                logger.warning("%s: calls take %.1f times as long", self._pin, 1 / self.speed_ratio)

    def _promised(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> float:
        """The manifest's median for inputs of these sizes, in seconds; infinite without one."""
        point = self._model.sizes_of(args, kwargs)
        payload = self._model.payload_for(point)
        latency = self._model.manifest.latency
        medians = [math.inf]
        for figures in latency.points if latency else ():
            is_count = payload.num_threads in (None, figures.num_threads)
            if is_count and (figures.payload, figures.point) == (payload.path, point):
                medians += [figures.p50 / 1e3] if figures.p50 else []
        return min(medians)

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            portable = self._prepare()
            call = self._calls.get()
            while call is not None:
                self._check(portable, *call)
                call = self._calls.get()
        except Exception as error:  # a payload may raise anything
            self._give_up(error)

    def _prepare(self) -> Any:
        """Load the portable program, and measure how far it is from the model on golden inputs.

        Raises:
            UsageError: the version has none.
        """
        from freezer.serving.load import load

        store = Store.open(self._options.store or "store")
        version = store.version(self._pin)
        if PORTABLE not in version.images:
            raise UsageError(f"it has no artifact for {PORTABLE} to compare with")
        alone = replace(
            self._options,
            device_class=PORTABLE,
            threads=1,
            device=None,
            limit_isa=False,
            strict=True,
            key=None,
        )
        portable = load(self._pin, alone)
        with scratch_folder() as folder:
            artifact = store.materialize(version, PORTABLE, folder, paths=[GOLDEN_INPUTS])
            sets = golden_inputs(artifact)
        costs = []
        for inputs in sets:
            started = time.thread_time()
            errors = _errors(portable.leaves(**inputs), self._model.leaves(**inputs))
            costs.append(time.thread_time() - started)
            usual = self._usual or errors
            self._usual = [max(pair) for pair in zip(usual, errors, strict=True)]
        self._cost_s = max(costs)
        self.is_ready, self.since = True, time.perf_counter()
        return portable

    def _check(
        self,
        portable: Any,
        inputs: Mapping[str, object],
        outputs: Sequence[Any],
    ) -> None:
        """Answer a call again."""
        started = time.thread_time()
        ratios = [0.0]
        errors = _errors(portable.leaves(**inputs), outputs)
        for error, usual in zip(errors, self._usual, strict=True):
            ratios.append(error / max(OVER * usual, 1.0))
        self._ratios.append(max(ratios))
        self.error_ratio = max(self._ratios)
        self.num_checks += 1
        self._cost_s = time.thread_time() - started
        self.cpu_s += self._cost_s
        if self._ratios[-1] > 1:
            logger.error("%s answers wrongly: %.3g times what is allowed", self._pin, max(ratios))

    def _give_up(self, error: Exception) -> None:
        self.problem = first_line(error)
        logger.warning("%s is not checked any more: %s", self._pin, self.problem)


def _copy(value: Any) -> Any:
    """A copy of an input or output, which the caller may overwrite."""
    return value.clone() if hasattr(value, "clone") else copy.deepcopy(value)


def _errors(expected: Sequence[Any], outputs: Sequence[Any]) -> list[float]:
    """The error of each output: of values that round relative to the gate's tolerance, of others
    the share that differs relative to one half.
    """
    errors = []
    for one, other in zip(expected, outputs, strict=True):
        r, c = values_of_output(one), values_of_output(other)
        if structure_problem(r, c, drawn=True):
            errors.append(math.inf)
        elif not r.rounds:
            errors.append(2 * float((r.array != c.array).mean()))
        else:
            sums = distances(r, c)[0]
            errors.append(sums.rmse / max(tolerance(r.dtype) * sums.rms, sys.float_info.min))
    return errors
