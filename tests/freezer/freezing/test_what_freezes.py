"""Every model of docs/reference/what-freezes.md ends as its row says, and every failure names the
reason and a remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import RECIPES, Case, failed, outcome_of, rows_of
from tests.support.models_export import EXPORT
from tests.support.models_inputs import INPUTS
from tests.support.models_operations import OPERATIONS
from tests.support.models_torchscript import TORCHSCRIPT
from tests.support.models_weights import WEIGHTS

CASES: Mapping[str, Case] = {**WEIGHTS, **INPUTS, **OPERATIONS, **TORCHSCRIPT, **EXPORT}
ROWS = {**rows_of("Features"), **rows_of("Corners")}

FAST = {
    ("a submodule that stays in training mode", "torchscript-frozen"),
    ("a buffer changed by a call", "inductor-frozen"),
    ("attributes that cannot be copied (locks, files)", "torchscript-frozen"),
    ("sparse inputs", "torchscript-frozen"),
    ("a sparse result", "torchscript-frozen"),
    ("models prepared for quantization", "inductor-frozen"),
    ("`nn.TransformerEncoder` with a padding mask", "inductor-frozen"),
    ("a custom operator with a fake kernel", "torchscript-frozen"),
    ("gradients inside `forward`", "torchscript-frozen"),
    ("`torch.jit.trace_module` with several methods", "torchscript-frozen"),
    ("a scripted module that branches on values", "inductor-frozen"),
    ("`@torch.jit.ignore`", "torchscript-frozen"),
    ("`torch.jit.is_scripting()` with a different result", "torchscript-frozen"),
    ("a module of a `ModuleList` chosen by a value", "torchscript-frozen"),
    ("a custom operator without a fake kernel", "inductor-frozen"),
    ("writes into a part of its input", "torchscript-frozen"),
}
"""Cases that other tests do not have, and of every kind of failure; the others are slow."""

VARIANTS = ("torchscript-exact", "torchscript-optimized")

ENGINES = ("onnxruntime", "openvino")
EXCEPTIONS = rows_of("Engines", ENGINES)
"""What the engines take differently from inductor-frozen."""


def test_page_and_models_name_the_same_rows() -> None:
    assert sorted(ROWS) == sorted(CASES)
    assert {name for name, _ in FAST} <= set(CASES)
    assert set(EXCEPTIONS) <= set(ROWS)


def test_every_failure_has_a_remedy_on_the_page() -> None:
    for name, row in ROWS.items():
        assert row["remedy"] or not any(failed(row[recipe]) for recipe in RECIPES), name


NOT_OPTIMIZED = {
    "weights in channels-last layout": ("rejected",),
    "modules of several dtypes": ("trace", "rejected"),
}
"""Models that torch.jit.optimize_for_inference changes beyond the gate; whether bfloat16 is rounded
so far depends on the CPU."""


def expected(name: str, recipe: str) -> tuple[str, ...]:
    """The outcomes that the page allows."""
    if recipe == "torchscript-optimized" and name in NOT_OPTIMIZED:
        return NOT_OPTIMIZED[name]
    if recipe in VARIANTS:
        return (ROWS[name]["torchscript-frozen"],)
    if recipe in ENGINES:
        return (EXCEPTIONS[name][recipe] if name in EXCEPTIONS else ROWS[name]["inductor-frozen"],)
    return (ROWS[name][recipe],)


def pairs() -> list[Any]:
    """Every model with every recipe that the page speaks of."""
    found = []
    for name in CASES:
        for recipe in (*RECIPES, *ENGINES, *VARIANTS):
            marks = () if (name, recipe) in FAST else pytest.mark.slow
            found.append(pytest.param(name, recipe, marks=marks))
    return found


@pytest.mark.parametrize(("name", "recipe"), pairs())
def test_outcome_matches_the_page(name: str, recipe: str, tmp_path: Path) -> None:
    if recipe in ENGINES:
        pytest.importorskip(recipe)
    outcome = outcome_of(CASES[name], recipe, tmp_path / "candidate")
    assert outcome.cell in expected(name, recipe), outcome.message
    if recipe in RECIPES and failed(outcome.cell):
        assert re.search(CASES[name].reason(recipe, outcome.cell), outcome.message), outcome.message
