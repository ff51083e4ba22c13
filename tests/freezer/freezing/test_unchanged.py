"""Freezing changes neither the caller's model nor the caller's process."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import freezer
from freezer.errors import JudgeError, SpecError
from tests.support.models import Counter, scripted_module, seeded
from tests.support.snapshots import changes, model_state, process_state, script_state
from tests.support.steps import HERE, QUICK_OPTIONS, random_inputs

IMAGE = random_inputs(2, 3, 8, 8)


class Busy(nn.Module):
    """Has a part of every kind that a freeze could change."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight
        self.sliced = nn.Parameter(torch.randn(8, 8)[::2, ::2])
        self.scale = nn.Buffer(torch.full((4,), 3.0))
        self.shift = nn.Buffer(torch.full((4,), 5.0), persistent=False)
        self.one.bias.requires_grad_(False)
        self.sizes, self.options, self.loose = [1, 2], {"deep": {"rate": 0.5}}, torch.ones(4)
        self.calls: list[str] = []
        for name in ("register_forward_hook", "register_forward_pre_hook"):
            getattr(self.one, name)(lambda *given: None)
        for name in ("register_full_backward_hook", "register_full_backward_pre_hook"):
            getattr(self.other, name)(lambda *given: None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.conv(x))).mean((2, 3))
        x = self.other(self.one(self.normed(x))) @ self.sliced
        return x * self.scale + self.shift + self.loose


def busy() -> nn.Module:
    """In eval mode, with gradients of a training step."""
    model = seeded(Busy)
    model(IMAGE).sum().backward()
    return model


class Gambling(nn.Module):
    """Draws from every generator."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x) + random.random() + float(np.random.rand())


def frozen(model: Any, x: Tensor, out: Path, recipe: str) -> Any:
    device_class = "portable" if recipe == "portable" else HERE
    options = replace(QUICK_OPTIONS, recipes=[recipe], device_class=device_class)
    return freezer.freeze(model, {"x": x}, out=out, options=options)


def check_unchanged(
    model: nn.Module, freeze: Callable[[], Any], state: Callable[[nn.Module], Any] = model_state
) -> Any:
    """Run a freeze; model and process must be the same afterwards. Return the result."""
    before, process = state(model), process_state()
    result = freeze()
    assert changes(process, process_state()) == []
    assert state(model) == before
    return result


@pytest.mark.parametrize(
    "recipe",
    ["torchscript-frozen", "portable", pytest.param("inductor-frozen", marks=pytest.mark.slow)],
)
def test_freeze_changes_neither_model_nor_process(recipe: str, tmp_path: Path) -> None:
    model = busy()
    result = check_unchanged(model, lambda: frozen(model, IMAGE, tmp_path / "out", recipe))
    assert result.verdict == "published", result.reason
    torch.testing.assert_close(freezer.load(tmp_path / "out")(IMAGE), model(IMAGE))


def test_freeze_does_not_change_a_scriptmodule(tmp_path: Path) -> None:
    model = scripted_module(seeded(Counter))
    x = random_inputs(2, 4)
    result = check_unchanged(
        model, lambda: frozen(model, x, tmp_path / "out", "torchscript-frozen"), script_state
    )
    assert result.verdict == "published", result.reason
    assert torch.equal(model(x), x + 1), "its first call"


def test_freeze_restores_random_generators(tmp_path: Path) -> None:
    model = Gambling().eval()
    check_unchanged(model, lambda: frozen(model, random_inputs(2, 4), tmp_path / "out", "portable"))


@pytest.mark.parametrize(
    ("make", "error"), [(lambda: busy().train(), SpecError), (busy, JudgeError)]
)
def test_refused_freeze_changes_nothing(
    make: Callable[[], nn.Module], error: type[Exception], tmp_path: Path
) -> None:
    model = make()

    def refused() -> None:
        with pytest.raises(error):
            frozen(model, random_inputs(2, 5), tmp_path / "out", "portable")

    check_unchanged(model, refused)


def test_failed_build_changes_nothing(tmp_path: Path) -> None:
    model = seeded(Counter)
    result = check_unchanged(
        model, lambda: frozen(model, random_inputs(2, 4), tmp_path / "out", "inductor-frozen")
    )
    assert (result.verdict, result.artifact, result.judgement) == ("failed", None, None)
    assert "a call changes count" in result.reason
