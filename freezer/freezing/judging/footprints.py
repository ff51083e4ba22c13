"""Footprints: load time and memory of every candidate, each in fresh processes."""

from __future__ import annotations

import logging
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from freezer.artifact import ColdStart, serving, set_for
from freezer.errors import JudgeError
from freezer.freezing.candidates import Candidate
from freezer.freezing.judging.cold_start import Opening, measure
from freezer.freezing.judging.trials import Trial
from freezer.freezing.models import Subject
from freezer.freezing.target import Target
from freezer.runtime.input_sets import distinct_at
from freezer.runtime.tensors import save_tensors
from freezer.spec import Limits, Objective

NUM_LOADS = 3
"""Fresh processes of each candidate whose median load time decides.

Memory hardly varies: one is enough.
"""

logger = logging.getLogger("coldpress")


def with_footprints(
    trials: Sequence[Trial], subject: Subject, target: Target, limits: Limits, objective: Objective
) -> list[Trial]:
    """The trials, the passing ones with their load time and memory if the objective or a limit is
    about them.

    A candidate that a fresh process cannot open and call no longer passes.
    """
    if objective not in ("load", "memory") and limits.memory_mb_max is None:
        return list(trials)
    trials = list(trials)
    taken: dict[int, list[ColdStart]] = {
        index: [] for index, trial in enumerate(trials) if trial.problem is None
    }
    with tempfile.TemporaryDirectory(prefix="coldpress-") as folder:
        inputs = Path(folder) / "inputs.safetensors"
        example = distinct_at(subject.spec, subject.on_host.sets, subject.points[0])[0]
        save_tensors({f"0/{name}": tensor for name, tensor in example.tensors.items()}, inputs)
        for _ in range(
            NUM_LOADS if objective == "load" else 1
        ):  # in turn: what slows the machine down slows down all
            for index, found in taken.items():
                if trials[index].problem is None:
                    try:
                        found.append(
                            measure(_opening(trials[index].candidate, subject, target, inputs))
                        )
                    except JudgeError as error:
                        trials[index] = replace(trials[index], problem=str(error), answers=())
    for index, found in taken.items():
        if trials[index].problem is None:
            trials[index] = replace(trials[index], cold_start=_median(found))
    return trials


def _opening(candidate: Candidate, subject: Subject, target: Target, inputs: Path) -> Opening:
    payload = serving(set_for(candidate.payloads, target.num_threads), subject.points[0])
    assert payload is not None, "every recipe builds a payload for all sizes"
    return Opening(
        folder=candidate.folder,
        payload=payload,
        settings=candidate.settings,
        spec=subject.spec,
        num_threads=target.num_threads,
        device=str(target.device),
        inputs=inputs,
    )


def _median(found: Sequence[ColdStart]) -> ColdStart:
    return ColdStart(
        **{
            item.name: statistics.median(getattr(one, item.name) for one in found)
            for item in fields(ColdStart)
        }
    )
