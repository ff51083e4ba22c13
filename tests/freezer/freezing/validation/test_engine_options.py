"""Options of engines: which one is taken, and that a judge records it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from freezer.freezing.validation.engine_options import OPTIONS, fastest, tuned
from freezer.timing.sampling import Sampling
from tests.models import mlp
from tests.steps import QUICK, candidate_of, judgement_of, subject_of


def sampling_of(ms: dict[str, float], num_rounds: dict[str, int], *, stable: bool = True) -> Sampling:
    samples = {name: [[value]] * num_rounds[name] for name, value in ms.items()}
    return Sampling(samples_ms=samples, num_dropped=0, settled=True, stable=stable)


def test_default_stays_unless_it_was_stopped() -> None:
    ms = {"default": 2.0, "one": 1.5, "other": 1.0}
    every = dict.fromkeys(ms, 10)
    assert fastest(sampling_of(ms, every), "default", ["one", "other"]) == "default", "perhaps by chance"
    stopped = sampling_of(ms, {**every, "default": 5})
    assert fastest(stopped, "default", ["one", "other"]) == "other"
    assert fastest(sampling_of(ms, {**every, "default": 5, "other": 5}), "default", ["one", "other"]) == "one"
    assert fastest(sampling_of(ms, {**every, "default": 5}, stable=False), "default", ["one", "other"]) == "default"


def test_judge_keeps_one_of_the_settings(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    subject = subject_of(mlp(), {"x": torch.ones(2, 4)})
    candidate = candidate_of(subject, "onnxruntime", tmp_path / "c")
    (trial,) = judgement_of(subject, [candidate]).trials
    added = [{}, *(option["session"] for option in OPTIONS["onnxruntime"].values())]
    assert trial.candidate.settings in [
        {**candidate.settings, "session": {**candidate.settings["session"], **one}} for one in added
    ]
    assert trial.candidate.recipe == "onnxruntime"
    assert trial.problem is None


def test_candidates_without_options_stay(tmp_path: Path) -> None:
    subject = subject_of(nn.Sequential(nn.Linear(4, 4)), {"input": torch.ones(2, 4)})
    candidate = candidate_of(subject, "torchscript-frozen", tmp_path / "c")
    assert tuned(subject, candidate, 1, QUICK) is candidate
