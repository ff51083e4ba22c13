"""ExportedPrograms, and other methods of ScriptModules, as sources."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freezer.freezing.models import Subject, module_of, prepare
from freezer.freezing.models.loaders import with_forward
from freezer.runtime.loaders import torchscript_deprecations_silenced
from freezer.runtime.tensors import leaves_of
from freezer.spec import declared_spec
from tests.support.models import seeded
from tests.support.steps import captured_by, random_inputs


class Attending(nn.Module):
    """[batch, length, 4] to scores; its graph computes with sizes, asserts dtypes and casts."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(16, 4), nn.Linear(4, 3)
        self.weight = torch.ones(4)  # neither a parameter nor a buffer

    def forward(self, x: Tensor, *, options: dict[str, Tensor]) -> dict[str, Tensor]:
        size, length = x.shape[0], x.shape[1]
        places = self.table(torch.arange(length, device=x.device))
        h = (x + places).to(torch.float32) * self.weight * options["scale"]
        mask = torch.full((length, length), True, dtype=torch.bool).tril()
        h = nn.functional.scaled_dot_product_attention(
            h[:, : length - 1], h, h, attn_mask=mask[: length - 1]
        )
        scores = self.last(h.reshape(size, -1, 4)) / length
        return {
            "scores": scores,
            "padded": torch.cat([scores, torch.zeros(size, 1, 3)], 1),
            "first": scores.narrow(1, 0, 1).expand(size, length, 3),
        }


def loaded(program: torch.export.ExportedProgram, folder: Path) -> torch.export.ExportedProgram:
    torch.export.save(program, str(folder / "program.pt2"))
    return torch.export.load(str(folder / "program.pt2"))


@pytest.fixture(scope="module")
def attending(tmp_path_factory: pytest.TempPathFactory) -> torch.export.ExportedProgram:
    """Loaded from a file, for batch 1 to 4 and length 3 to 8. Do not write to it."""
    batch, length = (
        torch.export.Dim("batch", min=1, max=4),
        torch.export.Dim("length", min=3, max=8),
    )
    shapes = {"x": {0: batch, 1: length}, "options": {"scale": None}}
    x, scale = random_inputs(2, 4, 4), random_inputs(4)
    program = torch.export.export(
        seeded(Attending), (x,), {"options": {"scale": scale}}, dynamic_shapes=shapes, strict=False
    )
    return loaded(program, tmp_path_factory.mktemp("program"))


def subject_of_program(
    program: torch.export.ExportedProgram, *, batch: int = 4, length: int = 8
) -> Subject:
    inputs: dict[str, Any] = {
        "x": {"shape": ["batch", "length", 4]},
        "options": {"dict": {"scale": {"shape": [4]}}},
    }
    return prepare(
        "model",
        module_of(program),
        declared_spec(inputs, {"batch": {"max": batch}, "length": {"min": 3, "max": length}}),
    )


def test_copy_runs_in_float64(attending: torch.export.ExportedProgram) -> None:
    module = module_of(attending)
    copied = copy.deepcopy(copy.deepcopy(module)).double()
    x, scale = random_inputs(3, 5, 4), random_inputs(4)
    wide = copied(x.double(), options={"scale": scale.double()})
    narrow = module(x, options={"scale": scale})
    assert wide["scores"].dtype == torch.float64, "casts that change nothing are removed"
    torch.testing.assert_close(wide["scores"].float(), narrow["scores"])
    assert module.get_parameter("last.weight").dtype == torch.float32


def test_module_is_captured_with_its_dims(attending: torch.export.ExportedProgram) -> None:
    subject = subject_of_program(attending)
    captured = captured_by(subject, "export")
    assert captured.warnings == ()
    run = captured.program.module()
    for batch, length in ((1, 3), (3, 7), (4, 8)):
        x, scale = random_inputs(batch, length, 4), random_inputs(4)
        expected = leaves_of(subject.model(x, options={"scale": scale}))
        for one, other in zip(run(x, scale), expected, strict=True):
            torch.testing.assert_close(one, other)


X = torch.ones(1, 4)


class ManyMethods(nn.Module):
    """Has state, and a method with arguments and defaults of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor = nn.Buffer(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x

    @torch.jit.export
    def scale(
        self,
        x: Tensor,
        by: Tensor | None = None,
        limit: float = math.inf,
        pair: tuple[int, float] = (2, 1.5),
        text: str = "it's",
    ) -> Tensor:
        self.calls.add_(1)
        y = (x if by is None else x * by) * pair[0] * pair[1]
        return y.clamp(max=limit) + self.calls


def test_with_forward_keeps_types_defaults_and_state(tmp_path: Path) -> None:
    with torchscript_deprecations_silenced():
        torch.jit.save(torch.jit.script(ManyMethods().eval()), tmp_path / "model.pt")
        wrapped = with_forward(torch.jit.load(tmp_path / "model.pt"), "scale")
    assert not wrapped.training
    assert torch.equal(wrapped(X), X * 3 + 1)
    assert torch.equal(wrapped(X, by=X * 2, limit=1.5), X * 1.5 + 2)
    again = copy.deepcopy(wrapped)
    assert float(again(X).mean()) == float(wrapped(X).mean()) == 6.0
