"""Operators of captured programs, those that only the model's own code registers, and texts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, library, nn

from freezer.errors import BuildError
from freezer.freezing.candidates import build
from freezer.freezing.capture import Attempt
from freezer.freezing.lowering import check_operators
from freezer.freezing.lowering.lowered import operators_of
from freezer.freezing.recipes import RECIPES
from freezer.freezing.target import target_here
from freezer.runtime.tensors import address_of
from tests.support.models import Calling, Counter, seeded
from tests.support.steps import HERE, random_inputs, subject_of

X = random_inputs(2, 4)

library.define("coldpress_own::tripled", "(Tensor x) -> Tensor")
library.impl("coldpress_own::tripled", "CPU", lambda x: x * 3)
library.register_fake("coldpress_own::tripled", torch.empty_like)


def tripled(x: Tensor) -> Any:
    return torch.ops.coldpress_own.tripled(x) + 1


def in_a_branch(x: Tensor) -> Tensor:
    out: Tensor = torch.cond(
        x.sum() > 0, lambda x: torch.ops.coldpress_own.tripled(x) + 1, lambda x: x * 2, (x,)
    )
    return out


def test_discarded_model_has_no_further_way(tmp_path: Path) -> None:
    class Tripled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.ops.coldpress_own.tripled(x))

    def refused(model: nn.Module, folder: Path) -> str:
        folder.mkdir()
        recipe = replace(
            RECIPES["inductor-frozen"], ways=(("export", "inductor"), ("trace", "torchscript"))
        )
        with pytest.raises(BuildError) as caught:
            build(subject_of(model, {"x": X}), recipe, target_here(HERE, 1), folder, discard=True)
        return str(caught.value)

    model, counter = Tripled(4, 4), seeded(Counter)
    assert re.match(
        r"export: inductor: the graph calls coldpress_own.*; trace: torchscript: the graph",
        refused(model, tmp_path / "1"),
    )
    assert address_of(model.weight) is not None
    assert re.match(
        r"export: inductor: a call changes [^;]*; torchscript-frozen keeps state$",
        refused(counter, tmp_path / "2"),
    )
    assert all(address_of(buffer) is None for buffer in counter.buffers())


@pytest.mark.parametrize("function", [tripled, in_a_branch])
def test_operators_in_branches(function: Callable[[Tensor], Tensor]) -> None:
    program = Attempt(subject_of(Calling(function), {"x": X}), None).capture("export").program
    assert "coldpress_own::tripled" in operators_of(program)
    with pytest.raises(BuildError):
        check_operators(program, "exported")


def test_operators_inductor_compiles_pass() -> None:
    import torch.ao.quantization.fx._decomposed

    def decomposed(x: Tensor) -> Any:
        q = torch.ops.quantized_decomposed.quantize_per_tensor(x, 0.1, 0, -128, 127, torch.int8)
        return torch.ops.quantized_decomposed.dequantize_per_tensor(
            q, 0.1, 0, -128, 127, torch.int8
        )

    program = Attempt(subject_of(Calling(decomposed), {"x": X}), None).capture("export").program
    check_operators(program, "inductor")
    with pytest.raises(
        BuildError,
        match=(
            "quantized_decomposed::dequantize_per_tensor, quantized_decomposed::quantize_per_tensor"
        ),
    ):
        check_operators(program, "exported")
