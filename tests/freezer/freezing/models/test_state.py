"""Frozen stateful models answer like eager over sequences of calls, and reset restores the initial
state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import freezer
from freezer.errors import JudgeError
from freezer.freezing.candidates import Candidate
from freezer.freezing.drift import run_reference
from freezer.freezing.models import Subject, SubjectOptions, example_spec, prepare, weights_digest
from tests.support.models import seeded
from tests.support.models_state import (
    HiddenState,
    InPlace,
    Number,
    OptionalState,
    RunningMean,
)
from tests.support.steps import (
    BATCH,
    artifact_of,
    candidate_of,
    judgement_of,
    quickly,
    random_inputs,
)

STATEFUL = (InPlace, Number, RunningMean, HiddenState, OptionalState)
RECIPES = ("torchscript-frozen", "torchscript-exact", "torchscript-optimized", "portable")
FAST = {
    (InPlace, "torchscript-frozen"),
    (Number, "torchscript-exact"),
    (RunningMean, "torchscript-optimized"),
    (OptionalState, "portable"),
}


def inputs_of(model: type[nn.Module], seed: int = 0) -> Tensor:
    return (
        random_inputs(2, 3, 8, 8, seed=seed)
        if model is RunningMean
        else random_inputs(2, 4, seed=seed)
    )


def stateful(
    model: nn.Module, x: Tensor, reset: str | None = "reset", dims: Any = None, **kwargs: Any
) -> Subject:
    spec, example = example_spec({"x": x}, dims or {})
    return prepare(
        "model", model, spec, [example], SubjectOptions(fill_up=True, reset=reset, **kwargs)
    )


def alike(recipe: str, model: type[nn.Module]) -> Callable[[Tensor, Tensor], None]:
    """A comparison of answers: exact if the same kernels run."""
    same_kernels = recipe in ("torchscript-exact", "portable") or (
        recipe == "torchscript-frozen" and model is not RunningMean
    )

    def check(got: Tensor, expected: Tensor) -> None:
        if same_kernels:
            assert torch.equal(got, expected)
        else:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)

    return check


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        pytest.param(kind, recipe, marks=() if (kind, recipe) in FAST else pytest.mark.slow)
        for kind in STATEFUL
        for recipe in RECIPES
    ],
)
def test_frozen_stateful_model_answers_like_eager(
    kind: type[nn.Module], recipe: str, tmp_path: Path
) -> None:
    subject = stateful(seeded(kind), inputs_of(kind))
    candidate = candidate_of(subject, recipe, tmp_path / "c")
    assert candidate.capture == "script"
    assert Candidate.read(candidate.folder).preserve == candidate.preserve == ("reset",)
    model, eager, check = candidate.open(subject), subject.fresh(), alike(recipe, kind)
    answers: list[list[Tensor]] = []
    for _ in range(3):
        answers.append([])
        for seed in (0, 1, 2, 0, 0):
            x = inputs_of(kind, seed)
            got = model(x)
            check(got, eager(x).detach())
            answers[-1].append(got.clone())
        model.reset()
        eager.reset()  # type: ignore[operator]
    assert not torch.equal(answers[0][0], answers[0][3])
    for first, again in zip(answers[0], answers[2], strict=True):
        assert torch.equal(first, again)


def test_judging_resets_between_sets(tmp_path: Path) -> None:
    subject = stateful(seeded(RunningMean), inputs_of(RunningMean))
    candidates = [candidate_of(subject, recipe, tmp_path / recipe) for recipe in RECIPES[1:3]]
    found = judgement_of(subject, candidates)
    assert found.verdict == "published", found.reason
    assert [trial.problem for trial in found.trials] == [None, None]
    reference = run_reference(subject)
    assert (reference.stateful, reference.deterministic, reference.float64) == (True,) * 3
    kinds = [call.kind for call in reference.calls[len(subject.sets) :]]
    assert kinds == ["sequence"] * 4 + ["after-reset"]
    assert torch.equal(reference.calls[-1].eager[0], reference.calls[0].eager[0])


class Forgetful(InPlace):
    """InPlace with a reset that does nothing."""

    @torch.jit.export
    def reset(self) -> None:
        self.count.add_(0)


def test_candidate_with_a_useless_reset_is_rejected(tmp_path: Path) -> None:
    x = random_inputs(32, 4)  # 128 elements: fewer than 64 are pooled over all sets
    subject, forgetful = stateful(seeded(InPlace), x), stateful(seeded(Forgetful), x)
    candidate = candidate_of(forgetful, "torchscript-frozen", tmp_path / "c")
    found: Any = judgement_of(subject, [replace(candidate, weights=weights_digest(subject.model))])
    assert found.verdict == "rejected"
    wrong = {(row.kind, row.set_index) for row in found.trials[0].drift.rows if row.problem}
    assert ("single", 0) not in wrong
    assert ("after-reset", 0) in wrong


class Lasting(InPlace):
    """Clears only half of what forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Tensor = nn.Buffer(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(1)
        return super().forward(x) + self.total


class Failing(InPlace):
    """Has a reset that fails."""

    def reset(self) -> None:
        raise RuntimeError("no state")


def used(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model(inputs_of(InPlace))
    return model


def test_incomplete_reset_is_an_error() -> None:
    for model in (seeded(Lasting), used(seeded(InPlace))):
        with pytest.raises(JudgeError) as caught:
            run_reference(stateful(model, inputs_of(InPlace)))
        assert caught.value.code == "CP-RESET"
    after_reset = used(seeded(InPlace))
    after_reset.reset()  # type: ignore[operator]
    assert run_reference(stateful(after_reset, inputs_of(InPlace))).stateful


def test_failing_reset_is_an_error() -> None:
    with pytest.raises(JudgeError) as caught:
        run_reference(stateful(seeded(Failing), inputs_of(InPlace)))
    assert caught.value.code == "CP-RESET"


class Memo(nn.Module):
    """Caches tables that depend only on the inputs' size, like rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.made.setdefault(len(x), torch.arange(float(len(x))))
        return x + self.made[len(x)][:, None]


class Calibrated(nn.Module):
    """Keeps the scale of its first input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.abs().max()
        return x / self.scale


def test_value_of_the_first_input_is_state() -> None:
    assert run_reference(stateful(Calibrated().eval(), random_inputs(2, 4), reset=None)).stateful


def test_cache_by_size_is_not_state() -> None:
    found = run_reference(
        stateful(Memo().eval(), random_inputs(2, 4), reset=None, dims={"x": {0: BATCH}})
    )
    assert (found.stateful, found.deterministic) == (False, True)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A torchscript-optimized artifact of a model with state, a version and a reset method, for
    batch 1 to 4.
    """
    model, x = seeded(HiddenState), {"x": inputs_of(HiddenState)}
    given = tmp_path_factory.mktemp("state") / "hidden", "torchscript-optimized"
    kept: dict[str, Any] = {"preserve": ["version", "hidden"], "reset": "reset"}
    return artifact_of(quickly(model, x, *given, dims={"x": {0: BATCH}}, **kept)).folder


def test_loaded_model_has_state_and_reset(artifact: Path) -> None:
    model, eager = freezer.load(artifact), seeded(HiddenState)
    manifest: Any = model.manifest
    assert manifest.stateful
    assert (manifest.recipe.preserve, manifest.recipe.reset) == (
        ("version", "hidden", "reset"),
        "reset",
    )
    assert torch.equal(model.hidden, torch.zeros(1, 6)), "the canary has left no trace"
    for _ in range(2):
        for seed in range(4):
            x = inputs_of(HiddenState, seed)
            torch.testing.assert_close(model(x), eager(x).detach())
        model.reset()
        eager.reset()  # type: ignore[operator]
    assert model.version == 1
    model.version = 2
    assert model.version == 2
    assert freezer.load(artifact).version == 1
