"""Scripts, models that mix traced and scripted parts, and names to keep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freezer.errors import CaptureError
from freezer.freezing.candidates import Candidate, build
from freezer.freezing.models import Subject, SubjectOptions, prepare
from freezer.freezing.recipes import RECIPES, CaptureName
from freezer.freezing.target import target_here
from freezer.runtime.loaders import torchscript_deprecations_silenced
from freezer.spec import declared_spec
from tests.support.models import Mlp, seeded
from tests.support.steps import BATCH, HERE, captured_by, random_inputs, subject_of

X = random_inputs(2, 4)
SIGNS = (X.abs(), -X.abs())


def sign_of(x: Tensor) -> Tensor:
    """A branch and a loop that depend on values."""
    y = x * 2 if bool(x.sum() > 0) else x * 3
    while bool(y.abs().max() > 1):
        y = y / 2
    return y


class Gate(nn.Module):
    """A branch after a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if bool(y.sum() > 0):
            return y
        return -y


def scripted(of: Any) -> Any:
    with torchscript_deprecations_silenced():
        return torch.jit.script(of)


def traced(of: Any, *tensors: Tensor) -> Any:
    with torchscript_deprecations_silenced(), torch.no_grad():
        return torch.jit.trace(of, tensors or (X,), check_trace=False)


class CallsScripted(nn.Module):
    """Can only be traced: a lambda around a scripted function and a scripted submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.gate = scripted(seeded(Gate))
        self.function = scripted(sign_of)

    def forward(self, x: Tensor) -> Any:
        h = sorted([self.first(x)], key=lambda item: item.shape)[0]  # no lambda in TorchScript
        return self.function(self.gate(h))


class HoldsTraced(nn.Module):
    """Can only be scripted: a branch around a traced submodule and a traced function."""

    def __init__(self) -> None:
        super().__init__()
        self.body = traced(seeded(Gatherer))
        self.scale = traced(lambda x: x * 2 + 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        if bool(y.sum() > 0):
            y = self.scale(y)
        return y


class Gatherer(nn.Module):
    """[batch, 4] to the same; can only be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [nn.Linear(4, 4)]
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        out: Tensor = self.last(torch.relu(x))
        return out


def frozen(
    subject: Subject, capture: CaptureName, folder: Path, recipe: str = "torchscript-frozen"
) -> Candidate:
    only = replace(RECIPES[recipe], ways=((capture, "torchscript"),))
    return build(subject, only, target_here(HERE, torch.get_num_threads()), folder)


@pytest.mark.parametrize(("model", "capture"), [(CallsScripted, "trace"), (HoldsTraced, "script")])
def test_mixed_models_keep_their_control_flow(
    model: type[nn.Module], capture: CaptureName, tmp_path: Path
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        source = model().eval()
    candidate = frozen(subject_of(source, {"x": X}, {"x": {0: BATCH}}), capture, tmp_path)
    served = candidate.open(subject_of(source, {"x": X}, {"x": {0: BATCH}}))
    answers = set()
    for x in (*SIGNS, X * 100, random_inputs(4, 4), random_inputs(1, 4)):
        with torch.no_grad():
            expected = source(x)
        torch.testing.assert_close(served(x), expected)
        answers.add(bool((expected > 0).any()))
    graph = str(captured_by(subject_of(source, {"x": X}), capture).program.inlined_graph)
    assert "prim::If" in graph


class Remembering(nn.Module):
    """Adds a buffer that grows; its other methods have no @torch.jit.export."""

    def __init__(self) -> None:
        super().__init__()
        self.version = "1.0"
        self.steps = 0
        self.kept: Tensor = nn.Buffer(torch.zeros(4))
        self.inner = Mlp()
        self.handle = object()

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.kept = self.kept + x.mean(0)
        return x + self.kept

    def reset(self) -> None:
        self.steps = 0
        self.kept = torch.zeros(4)

    def scaled(self, factor: int = 2) -> Tensor:
        return self.kept * factor


def kept(*names: str, reset: str | None = None) -> Subject:
    spec = declared_spec({"x": {"shape": [2, 4]}}, {})
    return prepare(
        "model", seeded(Remembering), spec, options=SubjectOptions(preserve=names, reset=reset)
    )


def test_script_keeps_methods_and_attributes() -> None:
    subject = kept("version", "steps", "scaled", "inner.first.in_features", reset="reset")
    captured = captured_by(subject, "script")
    assert captured.preserve == ("version", "steps", "scaled", "inner.first.in_features", "reset")
    program, eager = captured.program, seeded(Remembering)
    assert isinstance(eager, Remembering)
    for _ in range(2):
        assert torch.equal(program(X), eager(X))
    assert (program.version, program.steps) == ("1.0", 2)
    assert torch.equal(program.scaled(3), eager.scaled(3))
    program.reset()
    assert (program.steps, float(program.kept.sum())) == (0, 0)
    assert not any(
        hasattr(function, "_torchscript_modifier") for function in vars(Remembering).values()
    )


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_trace_and_export_cannot_keep_names(capture: CaptureName) -> None:
    what = {"trace": "a trace", "export": "an exported program"}[capture]
    with pytest.raises(
        CaptureError,
        match=(
            rf"^{what} keeps no attribute or method, and 'version', 'reset' must stay; preserve"
            r" needs"
        ),
    ) as caught:
        captured_by(kept("version", reset="reset"), capture)
    assert caught.value.code == "CP-PRESERVE"
