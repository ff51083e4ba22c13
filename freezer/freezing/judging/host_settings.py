"""Runtime settings of a winner: find those that make its calls faster than noise on this machine.

    plain     a fresh process in the judge's environment reports latency and page faults
    tried  each setting that this machine has and the figures call for, in a second process, in alternating blocks with the first
    together  those that gain, of each kind the best, against a plain process, both new: these
    figures are recorded

A setting that crashes, hangs, changes a bit of the outputs or does not gain is not used, and
recorded with the reason.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from statistics import median
from typing import IO, Any

from freezer.artifact import ColdStart, EnvironmentRecord, SettingGain
from freezer.codec import encode
from freezer.freezing.judging.cold_start import Opening, raised_in
from freezer.hardware import SETTINGS, RuntimeSetting, exports, merged
from freezer.spec import SamplingPolicy
from freezer.timing import CpuMeter, Sampling, Speedup, speedup

logger = logging.getLogger("coldpress")

LEAST_GAIN = 1.03
"""The lower bound of a gain must exceed it."""

PAGE_FAULT_MS = 5e-3
"""What a page fault costs at most: below 1 µs to clear 4 KB, and several where a hypervisor has to
find the memory first.
"""

SCREENING, DECIDING = 6, 24
"""Rounds to find out whether a setting may gain, and rounds to decide."""

MOST_MB = 1000.0
"""Largest process for which settings are tried: the judge's memory must hold two more."""

PAUSE_S = 0.03
"""Pause before a block: threads of the other process spin for some milliseconds after its last
call.
"""

_ANSWER_S = 60.0
"""Longest wait for an answer of a process."""


class _SettingError(Exception):
    """A process with a setting failed; the message says how."""


_Tried = tuple[RuntimeSetting, SettingGain]


class _Caller:
    """A fresh process that opens a payload and calls it; see calling_process.py.

    Args:
        opening: what it opens and calls.
        variables: settings for it, beside the environment of this process.
        errors: file for its stderr.

    Raises:
        _SettingError: it fails or does not answer.
    """

    def __init__(self, opening: Opening, variables: Mapping[str, str], errors: IO[str]) -> None:
        command = [sys.executable, "-m", "freezer.freezing.judging.calling_process"]
        own = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._errors = errors
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **own, **exports(variables).values},
        )
        self._request = json.dumps(encode(opening))
        self.digest = ""

    def open(self) -> None:
        """Open the payload, and call it once."""
        self.digest = self._ask(self._request)["digest"]

    def block(self, block_ms: float) -> dict[str, Any]:
        """Times in milliseconds of calls for a duration, and their page faults."""
        return self._ask(f"{block_ms}")

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + _ANSWER_S
        watch = threading.Timer(_ANSWER_S, self._process.kill)
        watch.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                print(line, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        finally:
            watch.cancel()
        if not answer:
            code = self._process.wait()
            self._errors.seek(0)
            how = (
                f"no answer within {_ANSWER_S:g} s"
                if time.monotonic() > deadline
                else f"exit code {code}"
            )
            raise _SettingError(f"{how}: {raised_in(self._errors.read())}")
        found: dict[str, Any] = json.loads(answer)
        return found


@contextlib.contextmanager
def _calling(opening: Opening, variables: Mapping[str, str]) -> Iterator[_Caller]:
    """A process with settings; it ends with the block."""
    with tempfile.TemporaryFile("w+") as errors:
        caller = _Caller(opening, variables, errors)
        try:
            caller.open()
            yield caller
        finally:
            caller.end()


def settings_gain(
    opening: Opening, cold_start: ColdStart, policy: SamplingPolicy
) -> EnvironmentRecord | None:
    """Try the runtime settings that this machine has. Nothing else should use it meanwhile.

    Args:
        opening: payload to open and call.
        cold_start: of the payload: how long a process takes to start, and how large it is.
        policy: its time limit bounds the start of further processes; a setting that was started is
            finished.

    Returns:
        None where nothing is tried: on a GPU, if three processes take longer to start than the time
        limit, or for large processes or slow calls.
    """
    start_s = (cold_start.import_torch_ms + cold_start.open_ms + cold_start.first_call_ms) / 1e3
    screening_s = 2 * SCREENING * cold_start.second_call_ms / 1e3
    too_long = max(3 * start_s, screening_s) > policy.time_limit_s
    if opening.device != "cpu" or too_long or cold_start.memory_peak_mb > MOST_MB:
        return None
    deadline = time.monotonic() + policy.time_limit_s
    try:
        with _calling(opening, {}) as plain:
            return _search(opening, plain, policy, deadline)
    except _SettingError as error:
        logger.warning("no runtime setting was tried: a process without any failed: %s", error)
        return None


def _search(
    opening: Opening, plain: _Caller, policy: SamplingPolicy, deadline: float
) -> EnvironmentRecord:
    plain.block(policy.block_ms)
    block = plain.block(2 * policy.block_ms)
    page_faults = block["page_faults"] / len(block["times_ms"])
    faults_matter = page_faults * PAGE_FAULT_MS > (LEAST_GAIN - 1) * median(block["times_ms"])
    tried = list[_Tried]()
    for setting in SETTINGS:
        if not _applies(setting, opening.num_threads, faults_matter=faults_matter):
            continue
        late = time.monotonic() > deadline
        problem = SettingGain(
            variables=setting.variables, problem="not tried within the time limit"
        )
        tried.append(
            (setting, problem if late else _tried(opening, plain, setting.variables, policy))
        )
    record = EnvironmentRecord(page_faults=page_faults, tried=tuple(gain for _, gain in tried))
    return _together(opening, plain.digest, tried, policy, record)


def _applies(setting: RuntimeSetting, num_threads: int, *, faults_matter: bool) -> bool:
    """Whether a setting is available, not in effect already, and may gain: libraries do other
    things than avoiding page faults.
    """
    lacking = exports(setting.variables)
    if lacking.missing or not lacking.values or (setting.kind == "openmp" and num_threads == 1):
        return False
    return bool(setting.install) or faults_matter


def _tried(
    opening: Opening, plain: _Caller, variables: Mapping[str, str], policy: SamplingPolicy
) -> SettingGain:
    """Time calls with a setting against those without."""
    try:
        with _calling(opening, variables) as other:
            if other.digest != plain.digest:
                return SettingGain(variables=variables, problem="the outputs differ")
            found, _ = _compared(plain, other, SCREENING, policy)
            if found.value > LEAST_GAIN:
                found, _ = _compared(plain, other, DECIDING, policy)
    except _SettingError as error:
        return SettingGain(variables=variables, problem=str(error))
    problem = "" if found.low > LEAST_GAIN else "no gain beyond noise"
    return SettingGain(
        variables=variables, gain=found.value, gain_ci=(found.low, found.high), problem=problem
    )


def _together(
    opening: Opening,
    digest: str,
    tried: Sequence[_Tried],
    policy: SamplingPolicy,
    record: EnvironmentRecord,
) -> EnvironmentRecord:
    """Add the best settings of each kind together, if they gain in two new processes; else the best
    one alone.

    Two processes may differ in speed without any setting, as their memory lies elsewhere.
    """
    gained = sorted(
        (pair for pair in tried if not pair[1].problem), key=lambda pair: -(pair[1].gain or 0)
    )
    best = {setting.kind: setting.variables for setting, _ in reversed(gained)}
    for variables in (
        (reduce(merged, best.values(), dict[str, str]()), gained[0][0].variables) if gained else ()
    ):
        with (
            contextlib.suppress(_SettingError),
            _calling(opening, {}) as plain,
            _calling(opening, variables) as other,
        ):
            found, medians = _compared(plain, other, DECIDING, policy)
            if other.digest == digest and found.low > LEAST_GAIN:
                return replace(
                    record,
                    variables=variables,
                    plain_p50=medians["plain"],
                    p50=medians["setting"],
                    gain=found.value,
                    gain_ci=(found.low, found.high),
                )
    return record


def _compared(
    plain: _Caller, other: _Caller, num_rounds: int, policy: SamplingPolicy
) -> tuple[Speedup, dict[str, float]]:
    """Gain of one process over the other, and the medians of both in milliseconds.

    Raises:
        _SettingError: a process failed, or others disturbed more rounds than are needed.
    """
    callers, shuffle, meter = (
        [("plain", plain), ("setting", other)],
        random.Random(policy.seed),
        CpuMeter(policy),
    )
    for _, caller in callers:
        caller.block(policy.block_ms)  # warm-up
    kept, num_tried = list[dict[str, list[float]]](), 0
    while len(kept) < num_rounds:
        if num_tried == 2 * num_rounds:
            raise _SettingError(
                f"only {len(kept)} of {num_tried} rounds were undisturbed; {meter.disturbance()}"
            )
        num_tried += 1
        shuffle.shuffle(callers)
        meter.begin()
        answers = dict[str, dict[str, Any]]()
        for name, caller in callers:
            time.sleep(PAUSE_S)
            answers[name] = caller.block(policy.block_ms)
        meter.count_as_own(sum(answer["cpu_s"] for answer in answers.values()))
        if not meter.disturbed():
            kept.append({name: answer["times_ms"] for name, answer in answers.items()})
    samples_ms = {name: [blocks[name] for blocks in kept] for name, _ in callers}
    sampling = Sampling(
        samples_ms=samples_ms, num_dropped=num_tried - num_rounds, settled=True, stable=True
    )
    found = speedup(sampling, "setting", eager="plain", num_candidates=len(SETTINGS), policy=policy)
    return found, {name: median(sampling.pooled(name)) for name in samples_ms}
