"""Cold start: load time, first call and peak memory of candidates, each in a fresh process.

Steady latency never includes these figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Timer
from typing import Any

from torch import Tensor

from freezer.artifact import ColdStart
from freezer.codec import decode, encode
from freezer.errors import JudgeError
from freezer.files import scratch_folder
from freezer.freezing import in_hand
from freezer.freezing.candidates import Candidate
from freezer.freezing.in_hand import take
from freezer.freezing.judging import fresh_process
from freezer.freezing.judging.judgement import Judgement, Trial
from freezer.freezing.judging.session import Session
from freezer.freezing.judging.timed_cells import deciding_alone
from freezer.runtime.input_sets import distinct_at
from freezer.runtime.tensor_files import save_tensors
from freezer.timing import alone

TIMEOUT_S = 300

ASKS = "may have the machine alone?"
"""Line of a fresh process that is ready to measure."""

MAX_SIZES = 12
"""Further sizes that the fresh process calls."""


def measure_memory(session: Session, judgement: Judgement) -> Judgement:
    """Measure the cold start of every passing candidate if memory is limited.

    A candidate that a fresh process cannot open and call no longer passes.
    """
    if session.limits.memory_mb_max is None or session.on_drift_alone:
        return judgement
    return judgement.with_passing(lambda trial: with_memory(session, trial))


def with_memory(session: Session, trial: Trial) -> Trial:
    """The trial with its cold start; with a problem instead if no fresh process can serve it."""
    try:
        return with_cold_start(session, trial)
    except JudgeError as error:
        return replace(trial, problem=str(error))


def measure_winner(session: Session, judgement: Judgement) -> Judgement:
    """Measure the cold start of the winner; untimed, it takes over that of an earlier version.

    Raises:
        JudgeError: no fresh process can serve it.
    """
    winner = judgement.winner
    if winner is None or (judgement.inherited and not session.timed):
        return judgement
    return judgement.with_winner(with_cold_start(session, winner))


def with_cold_start(session: Session, trial: Trial) -> Trial:
    """The trial with the cold start of its deciding payload; unchanged if it has one, or on an
    emulated CPU, where the fresh process only proves that it serves.

    Raises:
        JudgeError: the process fails or hangs.
    """
    if trial.cold_start is not None:
        return trial
    take(trial.recipe, "starting in a fresh process")
    with _opening(session, trial.candidate) as opening:
        before = in_hand.memory[in_hand.PAUSES]
        cold_start = measure(opening)
        if session.timed and in_hand.memory[in_hand.PAUSES] != before:
            with alone():
                cold_start = measure(opening)
    return replace(trial, cold_start=cold_start) if session.timed else trial


@contextmanager
def _opening(session: Session, candidate: Candidate) -> Iterator[fresh_process.Opening]:
    """The deciding payload of a candidate with inputs at the deciding point, and at the others that
    it takes: engines keep memory for every size.
    """
    subject, point = session.subject, session.subject.points[0]
    [payload] = deciding_alone(session, candidate).payloads
    example = distinct_at(subject.spec, subject.on_host.sets, point)[0]
    with scratch_folder() as folder:
        inputs = folder / "inputs.safetensors"
        others = (given for given in subject.on_host.sets if payload.accepts(given.point))
        by_point = {tuple(given.point.values()): given for given in others}
        sets = [example, *list(by_point.values())[:MAX_SIZES]]
        tensors: dict[str, Tensor] = {}
        for index, given in enumerate(sets):
            tensors |= {f"{index}/{name}": tensor for name, tensor in given.tensors.items()}
        save_tensors(tensors, inputs)
        yield fresh_process.Opening(
            folder=candidate.folder,
            payload=payload,
            settings=candidate.settings,
            spec=subject.spec,
            num_threads=session.num_threads,
            inputs=inputs,
            num_sets=len(sets),
            device=str(session.target.device),
        )


def measure(opening: fresh_process.Opening) -> ColdStart:
    """Measure a payload in a fresh process of the same environment. Times are in milliseconds,
    memory in 1e6 bytes.

    Raises:
        JudgeError: the process fails or hangs.
    """
    task = f"open and call {Path(opening.payload.path).name}"
    answer = ask_fresh_process(fresh_process.__file__, encode(opening), task, TIMEOUT_S)
    return decode(ColdStart, answer, origin="the fresh process")


def ask_fresh_process(
    program: str,
    request: object,
    task: str,
    timeout_s: float,
) -> Any:
    """Run a program in a fresh process of the same environment, with the request as a line of JSON
    on stdin; return its answer, the last line of stdout, from JSON.

    The program may print ASKS and read a line: then it has the machine alone until it ends.

    Args:
        task: what the program does, for messages.
        timeout_s: longest time until it asks, and from then on.

    Raises:
        JudgeError: the process fails or hangs.
    """
    paths = os.pathsep.join(filter(None, sys.path))
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            [sys.executable, "-P", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        ) as process,
    ):
        answer = _answer(process, json.dumps(request), timeout_s)
        if answer is None:
            raise JudgeError(f"a fresh process took over {timeout_s:g} s to {task}")
        if process.returncode:
            errors.seek(0)
            lines = errors.read().strip().splitlines() or ["no message"]
            raise JudgeError(f"a fresh process could not {task}: {lines[-1][:500]}")
    return json.loads(answer)


def _answer(process: subprocess.Popen[str], request: str, timeout_s: float) -> str | None:
    """The last line of a process's answer to a request; None if it was killed for its time."""
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None
    hangs = Event()

    def kill() -> None:
        hangs.set()
        process.kill()

    def tell(line: str, deadline: ExitStack) -> None:
        """Write a line, without a buffer: closing would write it again. What follows has a
        deadline.
        """
        timer = Timer(timeout_s, kill)
        timer.start()
        deadline.callback(timer.cancel)
        with suppress(BrokenPipeError):
            os.write(stdin.fileno(), f"{line}\n".encode())

    answer = ""
    with ExitStack() as turn, ExitStack() as deadline:
        tell(request, deadline)
        for line in stdout:
            if line.strip() == ASKS:
                deadline.close()
                turn.enter_context(alone())
                tell("", deadline)
            elif line.strip():
                answer = line
        process.wait()
    return None if hangs.is_set() else answer
