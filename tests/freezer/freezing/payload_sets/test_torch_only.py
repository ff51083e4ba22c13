"""The second artifact of a winner that needs an engine: its candidate, and that it serves."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import freezer
from freezer.artifact import Artifact, read_artifacts
from freezer.cli.store_commands import pull
from freezer.freezing.judging import Judgement, Session, judge
from freezer.freezing.packaging import assemble
from freezer.freezing.payload_sets.other_payloads import with_torch_only
from freezer.freezing.target import target_here
from freezer.store import Store
from tests.support.models import mlp
from tests.support.steps import (
    BATCH,
    HERE,
    candidate_of,
    random_inputs,
    rewritten,
    session_of,
    subject_of,
)

EXACT = "payloads/exact.pt"
TARGET = target_here(HERE, 1)


@pytest.fixture(scope="module")
def session() -> Session:
    subject = subject_of(mlp(), {"x": random_inputs(2, 4)}, {"x": {0: BATCH}})
    return session_of(subject, TARGET)


@pytest.fixture(scope="module")
def judgement(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Judgement:
    """Of three candidates, with the one for ONNX Runtime as the winner."""
    folder = tmp_path_factory.mktemp("candidates")
    names = ("onnxruntime", "torchscript-frozen", "torchscript-exact")
    candidates = [candidate_of(session.subject, name, folder / name, TARGET) for name in names]
    found = judge(session, candidates)
    assert [trial.problem for trial in found.trials] == [None] * 3
    return replace(found, winner=found.trials[0], best=found.trials[0])


def assembled(session: Session, judgement: Judgement, folder: Path) -> Artifact:
    (folder / "work").mkdir()
    found = with_torch_only(session, judgement, folder / "work")
    assert found.torch_only is not None
    return assemble(session, found, dest=folder / "out", provenance={}, failures={})


@pytest.mark.parametrize("published", [False, True])
def test_two_artifacts_serve_one_class(
    session: Session,
    judgement: Judgement,
    published: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the folder OUT with OUT.torch beside it, and from a store."""
    best = assembled(session, judgement, tmp_path)
    second = Artifact.read(tmp_path / "out.torch")
    others: Any = judgement.trials[1:]
    fastest = max(others, key=lambda trial: trial.speedup.value)
    assert second.manifest.recipe.name == fastest.recipe
    reference, store = str(best.folder), Store.open(str(tmp_path / "store"), create=True)
    if published:
        reference = "mlp"
        store.publish("mlp", source_key="k", artifacts=read_artifacts(best.folder))
    for kind in ("onnxruntime", "torchscript"):
        if kind == "torchscript":
            monkeypatch.setattr("freezer.serving.load.find_spec", lambda name: None)
        model: Any = freezer.load(reference, store=str(store.root), threads=1)
        assert [payload.kind for payload in model.manifest.payloads] == [kind]
        for x in (random_inputs(1, 4), random_inputs(3, 4)):
            torch.testing.assert_close(model(x), mlp()(x))
    assert [refusal.reason for refusal in model.ladder] == ["runtime_missing"]


@pytest.mark.parametrize("time_limit_s", [20.0, 1e-9])
def test_only_the_payload_for_all_sizes_is_kept(
    session: Session, judgement: Judgement, time_limit_s: float, tmp_path: Path
) -> None:
    """Each contains the weights; the one that is kept is timed at the deciding size, if it can."""
    session = replace(session, policy=replace(session.policy, time_limit_s=time_limit_s))
    winner, *others = judgement.trials
    alone, kept = [], []
    for trial in others:
        (for_all,) = trial.candidate.payloads
        kept.append(for_all)
        (dim,) = for_all.dims
        folder = trial.candidate.folder
        shutil.copyfile(folder / for_all.path, folder / EXACT)
        exact = replace(for_all, path=EXACT, dims=(replace(dim, min=2, max=2),))
        candidate = replace(trial.candidate, payloads=(exact, for_all))
        alone.append(replace(trial, candidate=candidate))
    found = with_torch_only(session, replace(judgement, trials=(winner, *alone)), tmp_path)
    assert found.torch_only is not None
    second = found.torch_only.winner
    assert second is not None
    *both, payload = second.candidate.payloads
    assert payload in kept
    assert len(both) == (time_limit_s < 1)
    assert [dropped.payload for dropped in second.dropped] == ([] if both else [EXACT])
    assert second.speedup is not None
    assert {figures.payload for figures in second.points} == {payload.path}
    assert found.winner is not None
    assert found.winner.candidate == winner.candidate


@pytest.mark.parametrize(
    ("every", "missing", "kinds"),
    [
        (False, "", ["onnxruntime"]),
        (False, "onnxruntime", ["torchscript"]),
        (True, "onnxruntime", ["onnxruntime", "torchscript"]),
    ],
)
def test_pull_takes_what_serves_here(
    session: Session,
    judgement: Judgement,
    every: bool,
    missing: str,
    kinds: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    best = assembled(session, judgement, tmp_path)
    store = Store.open(str(tmp_path / "store"), create=True)
    store.publish("mlp", source_key="k", artifacts=read_artifacts(best.folder))
    find = "freezer.cli.store_commands.find_spec"
    monkeypatch.setattr(find, lambda name: None if name == missing else name)
    pull("mlp", tmp_path / "pulled", str(store.root), every=every)
    pulled = read_artifacts(tmp_path / "pulled")
    assert [one.manifest.payloads[0].kind for one in pulled] == kinds


def test_a_neighbour_of_other_weights_is_ignored(
    session: Session, judgement: Judgement, tmp_path: Path
) -> None:
    best = assembled(session, judgement, tmp_path)
    second = Artifact.read(tmp_path / "out.torch")
    assert read_artifacts(best.folder) == (best, second)
    rewritten(second, provenance={"weights": "sha256:other"})
    assert read_artifacts(best.folder) == (best,)


def test_a_winner_for_torch_alone_stays_alone(
    session: Session, judgement: Judgement, tmp_path: Path
) -> None:
    alone = replace(judgement, winner=judgement.trials[1])
    assert with_torch_only(session, alone, tmp_path) is alone


def test_a_candidate_over_the_size_limit_serves_nowhere(
    session: Session, judgement: Judgement, tmp_path: Path
) -> None:
    tight = replace(session, limits=replace(session.limits, size_mb_max=1e-6))
    assert with_torch_only(tight, judgement, tmp_path) is judgement


def test_damaged_second_artifact_keeps_the_winner(
    session: Session, judgement: Judgement, tmp_path: Path
) -> None:
    winner, *others = judgement.trials
    moved = [
        replace(trial, candidate=replace(trial.candidate, folder=tmp_path), cold_start=None)
        for trial in others
    ]
    found = with_torch_only(session, replace(judgement, trials=(winner, *moved)), tmp_path)
    assert found.torch_only is None
    assert found.winner == winner
    assert "no artifact that needs torch alone" in found.reason
