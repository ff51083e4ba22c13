"""Finalists: eager, the winner, the runner-up and the incumbent are timed again in a second, fresh
process, if that can change the verdict.

`over_processes` of freezer.timing combines both. This file is also the program of the second
process (`ask_fresh_process`), which asks for the machine once it has opened everything.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from freezer.codec import encode
from freezer.errors import JudgeError, first_line
from freezer.files import scratch_folder
from freezer.freezing.candidates import Candidate
from freezer.freezing.judging.cold_start import ASKS, ask_fresh_process
from freezer.freezing.judging.judgement import Judgement, Trial, again
from freezer.freezing.judging.session import Session
from freezer.freezing.judging.timed_cells import (
    deciding_alone,
    shares,
    time_cell,
    with_figures,
)
from freezer.freezing.judging.verdicts import over_footprint, ranked
from freezer.runtime.devices import CPU
from freezer.runtime.torch_settings import plain_precision
from freezer.timing import Sampling, share_machine

logger = logging.getLogger("coldpress")

NEAR = 1.05
"""Ratio of figures that may change places: 2.5 times the usual spread between processes, 2%, which
one process in 80 exceeds.
"""


def time_again(session: Session, judgement: Judgement) -> Judgement:
    """Time the finalists in a second process; its samples join those of the deciding cell. If it
    fails, the reason of the verdict says so.
    """
    trials = finalists(session, judgement)
    if not trials:
        return judgement
    cell, *others = judgement.cells
    try:
        second = _in_second_process(session, [trial.candidate for trial in trials])
    except Exception as error:  # pickling runs the user's code
        text = f"timed in one process only, which may be 5% off: {first_line(error)}"
        logger.warning("%s", text)
        return replace(judgement, reason=f"; {text}")
    further = {again(name): blocks for name, blocks in second.samples_ms.items()}
    samples_ms = {**cell.sampling.samples_ms, **further}
    cell = replace(cell, sampling=replace(cell.sampling, samples_ms=samples_ms))
    timed = with_figures(session, judgement, [cell, *others])
    return replace(timed, reason="; timed in two processes")


def finalists(session: Session, judgement: Judgement) -> list[Trial]:
    """The best two trials and the incumbent's, if another process may change which of them or eager
    serves; otherwise none.

    On a GPU, and in rounds that other processes disturbed, other errors are larger.
    """
    limits, sampling = session.limits, judgement.sampling
    if sampling is None or not sampling.stable or sampling.clock == "disturbed":
        return []
    within = [trial for trial in judgement.passing if over_footprint(limits, trial) is None]
    if not within or session.on_drift_alone or session.target.device != CPU:
        return []
    best = ranked(session, within, sampling)[:2]
    old = [judgement.old] if judgement.old and not limits.allow_regression else []
    first, *runners_up = [trial.speedup for trial in best if trial.speedup]
    serving, close = first.value, _near(first.low, limits.speedup_min)
    if first.low <= limits.speedup_min:  # eager serves
        serving, runners_up = 1.0, []
    for rival in (*runners_up, *[trial.speedup for trial in old]):
        close |= rival is not None and _near(rival.value, serving)
    return [*best, *old] if close else []


def _near(first: float, second: float) -> bool:
    return second / NEAR < first < second * NEAR


def _in_second_process(session: Session, candidates: Sequence[Candidate]) -> Sampling:
    """Samples of eager and candidates at the deciding point, in a quarter of the time limit.

    Raises:
        JudgeError: the process fails, or is too disturbed.
    """
    subject, (policy, _) = session.subject, shares(session)
    policy = replace(
        policy,
        time_limit_s=policy.time_limit_s / 2,
        accept_noise=False,
    )
    kind = type(subject.model)
    root = Path(inspect.getfile(kind)).parents[kind.__module__.count(".")]
    entrants = [deciding_alone(session, candidate) for candidate in candidates]
    call = partial(time_cell, subject, entrants, session.num_threads, subject.points[0], policy)
    with scratch_folder() as folder:
        path = folder / "call.pickle"
        with path.open("wb") as file:
            _Pickler(file).dump(call)
        request, timeout_s = [str(path), str(root)], session.limits.timeout_s / 3
        answer = ask_fresh_process(__file__, request, "time the finalists", timeout_s)
    sampling = Sampling(**answer)
    if not sampling.stable:
        raise JudgeError(sampling.problem)
    return sampling


class _Pickler(pickle.Pickler):
    """Pickles ScriptModules too."""

    def reducer_override(self, value: Any) -> Any:
        """How to make a value again, as for `__reduce__`."""
        if isinstance(value, torch.jit.ScriptModule):
            return torch.jit.load, (BytesIO(value.save_to_buffer()),)
        return NotImplemented


def main(path: str, search_path: str) -> Sampling:
    """Make a pickled call in this process, where modules may also be in a further folder."""
    sys.path.append(search_path)
    share_machine(_alone)
    with plain_precision(CPU):
        sampling: Sampling = pickle.loads(Path(path).read_bytes())().sampling
    return sampling


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Wait until the process that asked has the machine for this one."""
    print(f"\n{ASKS}", flush=True)
    sys.stdin.readline()
    yield


if __name__ == "__main__":
    print(f"\n{json.dumps(encode(main(*json.loads(sys.stdin.readline()))))}")
