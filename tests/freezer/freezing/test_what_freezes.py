"""Every model of docs/reference/what-freezes.md ends as its row says, and every failure names the
reason and a remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cases import RECIPES, Case, failed, outcome_of, rows_of
from tests.support.models import Calling
from tests.support.models_export import EXPORT
from tests.support.models_inputs import INPUTS, complex_inside
from tests.support.models_operations import OPERATIONS
from tests.support.models_torchscript import TORCHSCRIPT
from tests.support.models_weights import WEIGHTS

CASES: Mapping[str, Case] = {**WEIGHTS, **INPUTS, **OPERATIONS, **TORCHSCRIPT, **EXPORT}
ROWS = {**rows_of("Features"), **rows_of("Corners")}

FAST = {
    ("tied weights", "portable"),
    ("a submodule that stays in training mode", "torchscript-frozen"),
    ("a buffer changed by a call", "inductor-frozen"),
    ("attributes that cannot be copied (locks, files)", "torchscript-frozen"),
    ("sparse inputs", "torchscript-frozen"),
    ("a sparse result", "torchscript-frozen"),
    ("models prepared for quantization", "inductor-frozen"),
    ("`nn.LSTM`, `nn.GRU`", "portable"),
    ("packed sequences", "torchscript-frozen"),
    ("`nn.TransformerEncoder` with a padding mask", "inductor-frozen"),
    ("a custom operator with a fake kernel", "torchscript-frozen"),
    ("gradients inside `forward`", "torchscript-frozen"),
    ("`torch.jit.trace_module` with several methods", "torchscript-frozen"),
    ("a scripted module that branches on values", "inductor-frozen"),
    ("`@torch.jit.ignore`", "torchscript-frozen"),
    ("`torch.jit.is_scripting()` with a different result", "torchscript-frozen"),
    ("a module of a `ModuleList` chosen by a value", "torchscript-frozen"),
    ("a branch on a size", "portable"),
    ("NumPy inside `forward`", "portable"),
    ("a custom operator without a fake kernel", "inductor-frozen"),
    ("writes into a part of its input", "torchscript-frozen"),
    ("`random.random()`, the clock, a counter in a global", "portable"),
}
"""A case of every capture and of every kind of failure; the others are slow."""

VARIANTS = ("torchscript-exact", "torchscript-optimized")
NOT_OPTIMIZED = {
    "weights in channels-last layout": r"strides \(144, 36, 6, 1\), eager's are \(144, 1, 24, 4\)",
    "modules of several dtypes": r"max_abs_err .* \(float32, the reference is eager\)",
}
"""Models that torch.jit.optimize_for_inference changes beyond the gate, with the judge's reason."""

ENGINES = ("onnxruntime", "openvino")
EXCEPTIONS = rows_of("Engines", ENGINES)
"""What the engines take differently from inductor-frozen."""

COMPLEX = "complex numbers inside, a lazy conjugate as a result"
COMPLEX_WEIGHTS = "complex64 or complex128 weights and inputs"
FFT = "`einsum`, FFT, `nn.EmbeddingBag`, `torch.vmap`, activation checkpointing"
OTHERWISE = "; write it in other operations of torch, or use inductor-frozen or torchscript-frozen$"
REFUSALS = {
    (
        "`F.dropout` without `training=`, `torch.rand`",
        "onnxruntime",
    ): r"the variances of output 'output' differ from eager's over ",
    (
        "`F.dropout` without `training=`, `torch.rand`",
        "openvino",
    ): r"output 'output', .*: got shape \[4\], expected \[2, 4\]$",
    ("float64", "openvino"): r"error_ratio \S+ > 3",
    (
        "bfloat16",
        "onnxruntime",
    ): "ONNX Runtime has no Gemm for these dtypes on a CPU; use float32 there, or ",
    ("modules of several dtypes", "onnxruntime"): "ONNX Runtime has no Gemm for these dtypes",
    ("autocast regions", "onnxruntime"): "ONNX Runtime has no Gemm for these dtypes",
    (COMPLEX_WEIGHTS, "onnxruntime"): "is complex, which the engine lacks",
    (COMPLEX_WEIGHTS, "openvino"): "is complex, which the engine lacks",
    (COMPLEX, "onnxruntime"): "is complex, which the engine lacks; use torch.view_as_real",
    (COMPLEX, "openvino"): "is complex, which the engine lacks",
    (
        FFT,
        "openvino",
    ): f"OpenVINO has no counterpart of aten._fft_c2r.default, aten._fft_r2c.default{OTHERWISE}",
    (
        "sparse weights (COO, CSR)",
        "onnxruntime",
    ): "sparse tensors, .*; use it, or make them dense",
    (
        "sparse weights (COO, CSR)",
        "openvino",
    ): "sparse tensors, .*; use it, or make them dense",
    (
        "sparse tensors inside",
        "onnxruntime",
    ): f"the operator aten._to_sparse has no counterpart in ONNX{OTHERWISE}",
    (
        "sparse tensors inside",
        "openvino",
    ): f"no counterpart of .*aten._to_sparse.default{OTHERWISE}",
    (
        "a buffer changed by a call",
        "onnxruntime",
    ): "a call changes count, and .*; torchscript-frozen keeps state$",
    (
        "a buffer changed by a call",
        "openvino",
    ): "a call changes count, and .*; torchscript-frozen keeps state$",
}
"""Messages of refusals that are the engines' own."""


def test_page_and_models_name_the_same_rows() -> None:
    assert sorted(ROWS) == sorted(CASES)
    assert {name for name, _ in FAST} <= set(CASES)
    assert set(EXCEPTIONS) <= set(ROWS)


def test_every_failure_has_a_remedy_on_the_page() -> None:
    for name, row in ROWS.items():
        assert row["remedy"] or not any(failed(row[recipe]) for recipe in RECIPES), name


def pairs() -> list[Any]:
    return [
        pytest.param(name, recipe, marks=() if (name, recipe) in FAST else pytest.mark.slow)
        for name in CASES
        for recipe in RECIPES
    ]


@pytest.mark.parametrize(("name", "recipe"), pairs())
def test_outcome_matches_the_page(name: str, recipe: str, tmp_path: Path) -> None:
    outcome = outcome_of(CASES[name], recipe, tmp_path / "candidate")
    assert outcome.cell == ROWS[name][recipe], outcome.message
    if failed(outcome.cell):
        assert re.search(CASES[name].reason(recipe, outcome.cell), outcome.message), outcome.message


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_engines_take_what_the_page_says(name: str, engine: str, tmp_path: Path) -> None:
    pytest.importorskip(engine)
    outcome = outcome_of(CASES[name], engine, tmp_path / "candidate")
    assert outcome.cell == (
        EXCEPTIONS[name][engine] if name in EXCEPTIONS else ROWS[name]["inductor-frozen"]
    ), outcome.message
    if failed(outcome.cell) and (name in EXCEPTIONS or (name, engine) in REFUSALS):
        assert re.search(REFUSALS[name, engine], outcome.message), outcome.message


@pytest.mark.slow
def test_onnx_runtime_takes_complex_numbers_inside(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    case = Case(
        make=lambda: Calling(lambda x: torch.view_as_real(complex_inside(x)[1].resolve_conj()))
    )
    assert outcome_of(case, "onnxruntime", tmp_path / "candidate").cell == "export"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", VARIANTS)
@pytest.mark.parametrize(
    "name", [name for name in CASES if not failed(ROWS[name]["torchscript-frozen"])]
)
def test_torchscript_variants_take_the_same(name: str, recipe: str, tmp_path: Path) -> None:
    outcome = outcome_of(CASES[name], recipe, tmp_path / "candidate")
    if recipe == "torchscript-optimized" and name in NOT_OPTIMIZED:
        # Whether bfloat16 is rounded beyond the gate depends on the CPU.
        assert outcome.cell == "rejected" or name == "modules of several dtypes"
        assert re.search(NOT_OPTIMIZED[name], outcome.message) or outcome.cell != "rejected", (
            outcome.message
        )
    else:
        assert outcome.cell == ROWS[name]["torchscript-frozen"], outcome.message
