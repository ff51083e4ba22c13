"""Builds: what a recipe makes of a model, what it refuses, and the record that a candidate leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from freezer.build import Candidate
from freezer.errors import BuildError, CaptureError
from freezer.manifest import digest_file
from freezer.sources import weights_digest
from tests.conftest import Frozen
from tests.models import Branching, Counter, Mlp, mlp, seeded
from tests.steps import BATCH, candidate_of, random_inputs, subject_of

X = random_inputs(2, 4)


@pytest.mark.parametrize("recipe", ["torchscript-frozen", "portable"])
def test_a_candidate_answers_as_its_model(recipe: str, tmp_path: Path) -> None:
    subject = subject_of(mlp(), {"x": X}, {"x": {0: BATCH}})
    candidate = candidate_of(subject, recipe, tmp_path / "candidate")
    for batch in (1, 4):
        x = random_inputs(batch, 4, seed=batch)
        torch.testing.assert_close(candidate.open(subject)(x), mlp()(x))


def test_a_candidate_is_what_it_wrote(tmp_path: Path) -> None:
    subject = subject_of(mlp(), {"x": X}, {"x": {0: BATCH}})
    candidate = candidate_of(subject, "torchscript-frozen", tmp_path / "candidate")
    assert Candidate.read(tmp_path / "candidate") == candidate
    (payload,) = candidate.payloads
    path = tmp_path / "candidate" / payload.path
    assert (payload.digest, payload.size_bytes) == (digest_file(path), path.stat().st_size)
    assert payload.dims == (BATCH,)
    assert payload.num_threads is None
    assert candidate.weights == weights_digest(mlp())
    assert [item["capture"] for item in candidate.tried] == ["as-is", "trace"]
    with pytest.raises(FileNotFoundError):
        Candidate.read(tmp_path)


def test_inductor_refuses_a_model_that_changes_itself(tmp_path: Path) -> None:
    subject = subject_of(seeded(Counter), {"x": X})
    with pytest.raises(BuildError, match=r"a call changes model\.count, and freezing would bake the first values in"):
        candidate_of(subject, "inductor-frozen", tmp_path / "candidate")
    assert candidate_of(subject, "portable", tmp_path / "portable").stateful


def test_what_no_capture_takes_is_a_capture_error(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"export: torch\.export: "):
        candidate_of(subject_of(Branching(), {"x": X}), "inductor-frozen", tmp_path / "candidate")


def test_inductor_makes_a_payload_for_the_first_point_and_one_for_all(inductor: Frozen) -> None:
    first, dynamic = inductor.artifact.manifest.payloads
    assert [payload.path for payload in (first, dynamic)] == ["payloads/batch1.pt2", "payloads/all.pt2"]
    assert [(payload.dims[0].min, payload.dims[0].max) for payload in (first, dynamic)] == [(1, 1), (1, 4)]
    assert {payload.num_threads for payload in (first, dynamic)} == {torch.get_num_threads()}


def test_building_does_not_change_the_process(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    model = seeded(Mlp)
    candidate_of(subject_of(model, {"x": X}), "torchscript-frozen", tmp_path / "candidate")
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()
    assert weights_digest(model) == weights_digest(mlp())
