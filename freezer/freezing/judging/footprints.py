"""Footprints: the memory that every candidate adds to a fresh process, where a limit is about it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from freezer.artifact import payload_at, payloads_for_threads
from freezer.errors import JudgeError
from freezer.freezing.candidates import Candidate
from freezer.freezing.judging.cold_start import Opening, measure
from freezer.freezing.judging.trials import Trial
from freezer.freezing.models import Subject
from freezer.freezing.target import Target
from freezer.runtime.input_sets import distinct_at
from freezer.runtime.tensor_files import save_tensors
from freezer.spec import Limits


def with_footprints(
    trials: Sequence[Trial], subject: Subject, target: Target, limits: Limits
) -> list[Trial]:
    """The trials, the passing ones with their cold start if `memory_mb_max` is set.

    A candidate that a fresh process cannot open and call no longer passes.
    """
    if limits.memory_mb_max is None:
        return list(trials)
    with tempfile.TemporaryDirectory(prefix="coldpress-") as folder:
        inputs = Path(folder) / "inputs.safetensors"
        example = distinct_at(subject.spec, subject.on_host.sets, subject.points[0])[0]
        save_tensors({f"0/{name}": tensor for name, tensor in example.tensors.items()}, inputs)
        return [
            trial if trial.problem is not None else _with_cold_start(trial, subject, target, inputs)
            for trial in trials
        ]


def _with_cold_start(trial: Trial, subject: Subject, target: Target, inputs: Path) -> Trial:
    try:
        cold_start = measure(_opening(trial.candidate, subject, target, inputs))
    except JudgeError as error:
        return replace(trial, problem=str(error), answers=())
    return replace(trial, cold_start=cold_start)


def _opening(candidate: Candidate, subject: Subject, target: Target, inputs: Path) -> Opening:
    payload = payload_at(
        payloads_for_threads(candidate.payloads, target.num_threads), subject.points[0]
    )
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
