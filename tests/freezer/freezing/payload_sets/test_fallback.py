"""The fallback of a winner that needs an engine: which candidate it is, and that it serves from the
winner's artifact.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import freezer
from freezer.freezing.judging import Judgement, judge
from freezer.freezing.models import Subject
from freezer.freezing.packaging import assemble
from freezer.freezing.payload_sets.fallback import with_fallback
from freezer.freezing.target import target_here
from freezer.serving import load as load_module
from freezer.spec import Limits
from tests.support.models import mlp
from tests.support.steps import (
    ANY_SPEED,
    BATCH,
    HERE,
    QUICK,
    candidate_of,
    random_inputs,
    subject_of,
)

TARGET = target_here(HERE, 1)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return subject_of(mlp(), {"x": random_inputs(2, 4)}, {"x": {0: BATCH}})


@pytest.fixture(scope="module")
def judgement(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Judgement:
    """Of three candidates, with the one for ONNX Runtime as the winner."""
    folder = tmp_path_factory.mktemp("candidates")
    names = ("onnxruntime", "torchscript-frozen", "torchscript-exact")
    candidates = [candidate_of(subject, name, folder / name, TARGET) for name in names]
    found = judge(subject, candidates, TARGET, limits=ANY_SPEED, policy=QUICK)
    assert [trial.problem for trial in found.trials] == [None] * 3
    return replace(found, winner=found.trials[0], best=found.trials[0])


def test_the_fallback_serves_from_the_artifact(
    subject: Subject, judgement: Judgement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    found = with_fallback(subject, judgement, TARGET, tmp_path / "work")
    assert found.fallback is not None
    speeds = {
        trial.candidate.recipe: trial.speedup.value
        for trial in judgement.trials[1:]
        if trial.speedup
    }
    assert found.fallback.candidate.recipe == max(speeds, key=speeds.__getitem__)
    artifact = assemble(
        subject, found, TARGET, dest=tmp_path / "artifact", provenance={}, failures={}
    )
    artifact.verify()
    kinds = {}
    for installed in (True, False):
        if not installed:
            monkeypatch.setattr(load_module, "find_spec", lambda name: None)
        model = freezer.load(artifact.folder, threads=1)
        assert model.manifest is not None
        kinds[installed] = [payload.kind for payload in model.manifest.payloads]
        for x in (random_inputs(1, 4), random_inputs(3, 4)):
            torch.testing.assert_close(model(x), mlp()(x))
    assert kinds == {True: ["onnxruntime"], False: ["torchscript"]}
    assert [refusal.reason for refusal in model.ladder] == ["runtime_missing"]


def test_no_fallback_beyond_the_size_limit(
    subject: Subject, judgement: Judgement, tmp_path: Path
) -> None:
    assert judgement.winner is not None
    limits = Limits(size_mb_max=judgement.winner.candidate.size_bytes / 1e6)
    found = with_fallback(subject, replace(judgement, limits=limits), TARGET, tmp_path)
    assert found.fallback is None
    assert found.winner is not None
    assert "size_mb_max" in found.winner.dropped[-1].reason


def test_a_winner_for_torch_alone_has_no_fallback(
    subject: Subject, judgement: Judgement, tmp_path: Path
) -> None:
    alone = replace(judgement, winner=judgement.trials[1])
    assert with_fallback(subject, alone, TARGET, tmp_path) is alone
