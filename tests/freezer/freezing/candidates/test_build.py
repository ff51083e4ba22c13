"""Builds: candidates, refusals, the record of a build, and digests of architectures."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from freezer.artifact import PayloadKind
from freezer.files import digest_file
from freezer.freezing.candidates import Candidate, architecture_digest, build
from freezer.freezing.candidates.candidate import CANDIDATE
from freezer.freezing.capture import Attempt
from freezer.freezing.models import weights_digest
from freezer.freezing.recipes import RECIPES, CaptureName, Recipe
from freezer.freezing.target import target_here
from freezer.runtime.tensors import leaves_of
from tests.support.models import Branching, Counter, mlp, seeded
from tests.support.steps import BATCH, HERE, candidate_of, random_inputs, subject_of

X = random_inputs(2, 4)


def test_candidate_round_trip(tmp_path: Path) -> None:
    """Fields of earlier versions are ignored."""
    subject = subject_of(mlp(), {"x": X}, {"x": {0: BATCH}})
    candidate = candidate_of(subject, "torchscript-frozen", tmp_path / "candidate")
    (payload,) = candidate.payloads
    path = tmp_path / "candidate" / payload.path
    assert (payload.digest, payload.size_bytes) == (digest_file(path), path.stat().st_size)
    assert (payload.dims, payload.num_threads) == ((BATCH,), None)
    assert candidate.weights == weights_digest(mlp())
    with pytest.raises(FileNotFoundError):
        Candidate.read(tmp_path)
    record = tmp_path / "candidate" / CANDIDATE
    record.write_text(json.dumps({**json.loads(record.read_text()), "stateful": False}))
    assert Candidate.read(tmp_path / "candidate") == candidate


@pytest.fixture
def whatever_works() -> Recipe:
    """Ways of which most are not for a Python module."""
    ways: list[tuple[CaptureName, PayloadKind]] = [
        (name, "torchscript") for name in ("convert", "as-is", "trace", "script")
    ]
    return replace(RECIPES["torchscript-frozen"], ways=(("export", "exported"), *ways))


def built(model: nn.Module, recipe: Recipe, folder: Path) -> Candidate:
    folder.mkdir()
    return build(
        subject_of(model, {"x": X}), recipe, target_here(HERE, torch.get_num_threads()), folder
    )


def test_ways_are_tried_in_order(whatever_works: Recipe, tmp_path: Path) -> None:
    candidate = built(Branching(), whatever_works, tmp_path / "candidate")
    assert (candidate.capture, candidate.lowering) == ("script", "torchscript")
    captures = ("export", "convert", "as-is", "trace", "script")
    assert [item["capture"] for item in candidate.tried] == [*captures]
    outcomes = [item["outcome"] for item in candidate.tried]
    assert outcomes[1:3] == ["not tried: the source is not TorchScript"] * 2
    assert outcomes[4] == "captured and lowered"
    evidence = candidate.folder / "evidence"
    errors = sorted(path.name for path in evidence.glob("*-error.txt"))
    assert errors == ["all-0-export-error.txt", "all-3-trace-error.txt"]
    full = (evidence / errors[0]).read_text()
    assert "Could not guard on data-dependent expression" in full
    assert not any("deprecated" in line for line in candidate.warnings)


@pytest.mark.parametrize("model", [mlp(), seeded(Counter)], ids=["stateless", "stateful"])
def test_recipes_share_captures(model: nn.Module, tmp_path: Path) -> None:
    """Those of a model with state are made anew, in its initial state."""
    subject, target = subject_of(model, {"x": X}), target_here(HERE, torch.get_num_threads())
    attempts: dict[str, Attempt] = {}
    for number, name in enumerate(("torchscript-frozen", "torchscript-exact", "portable") * 2):
        (folder := tmp_path / str(number)).mkdir()
        candidate = build(subject, RECIPES[name], target, folder, attempts=attempts)
        served, eager = candidate.open(subject), copy.deepcopy(model)
        for _ in range(2):
            torch.testing.assert_close(leaves_of(served(X)), leaves_of(eager(X)))


class Own(nn.Sequential):
    """Its description fails, as a user's code may."""

    def extra_repr(self) -> str:
        raise RuntimeError("not described")


def digest(model: nn.Module, points: tuple[Mapping[str, int], ...] = ()) -> str:
    name = "input" if isinstance(model, nn.Sequential) else "x"
    return architecture_digest(
        subject_of(model, {name: X}, {name: {0: BATCH}}, points), target_here(HERE, 1)
    )


def test_weights_do_not_change_the_architecture() -> None:
    one, other = mlp(), mlp()
    other.last.bias.data += 1.0  # type: ignore[operator,union-attr]
    assert digest(one) == digest(other)


def test_what_changes_speed_changes_the_architecture() -> None:
    layers = [
        nn.Sequential(nn.Linear(4, 8), kind)
        for kind in (nn.ReLU(), nn.GELU(), nn.GELU(approximate="tanh"))
    ]
    models = [
        mlp(),
        Own(nn.Linear(4, 8), nn.ReLU()),
        *layers,
        nn.Sequential(nn.Linear(4, 9), nn.ReLU()),
    ]
    found = [*map(digest, models), digest(mlp(), ({"batch": 2},))]
    assert len(set(found)) == len(found)
