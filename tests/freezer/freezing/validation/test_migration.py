"""Migration: speedup and difference of a converted TorchScript model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from freezer.artifact.describe import describe, manifest_markdown
from freezer.artifact.sections import Migration
from freezer.freezing.freeze import FreezeResult, freeze
from freezer.freezing.validation.migration import Entrant, compare, refused
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced
from freezer.timing.sampling import Sampling
from tests.models import Halving, mlp
from tests.steps import QUICK, QUICK_OPTIONS, random_inputs

ANSWERS = [[random_inputs(3, 4, seed=seed)] for seed in range(3)]
LEGACY = Entrant(recipe="torchscript-frozen", capture="as-is", lowering="torchscript", passed=True, answers=ANSWERS)
CONVERTED = Entrant(recipe="inductor-frozen", capture="convert", lowering="inductor", passed=True, answers=ANSWERS)


def sampling_of(**samples_ms: list[float]) -> Sampling:
    rounds = {name.replace("_", "-"): [[value] * 3 for value in values] for name, values in samples_ms.items()}
    return Sampling(samples_ms=rounds, num_dropped=0, settled=True, stable=True)


def test_gain_is_over_the_fastest_torchscript() -> None:
    sampling = sampling_of(
        torchscript_frozen=[4.0, 4.2], torchscript_optimized=[2.0, 2.2], inductor_frozen=[1.0, 1.1], eager=[8.0, 8]
    )
    optimized = replace(LEGACY, recipe="torchscript-optimized")
    found = compare([LEGACY, optimized, CONVERTED], sampling, QUICK)
    assert found is not None
    assert (found.possible, found.recipe, found.against) == (True, "inductor-frozen", "torchscript-optimized")
    assert found.gain == pytest.approx(2.0)
    assert found.gain_ci is not None
    assert found.gain_ci[0] <= 2.0 <= found.gain_ci[1]


def test_difference_of_outputs() -> None:
    off = [[tensors[0] + 0.5] for tensors in ANSWERS]
    found = compare([LEGACY, replace(CONVERTED, answers=off)], None, QUICK)
    assert found is not None
    assert found.max_abs_diff == pytest.approx(0.5)
    everything = torch.cat([tensors[0] for tensors in ANSWERS])
    assert found.relative_rms_diff == pytest.approx(0.5 / math.sqrt(float((everything**2).mean())), rel=1e-5)
    assert found.gain is None, "nothing was timed"
    same = compare([LEGACY, CONVERTED], None, QUICK)
    assert same is not None
    assert (same.max_abs_diff, same.relative_rms_diff) == (0.0, 0.0)


def test_failed_conversion_has_a_reason() -> None:
    rejected = compare([LEGACY, replace(CONVERTED, passed=False)], None, QUICK)
    assert rejected is not None
    assert (rejected.possible, rejected.reason) == (False, "inductor-frozen does not pass the drift gate")


def test_reason_is_parsed_in_full() -> None:
    why = "the program differs from the model on input set 3; write the loop with torch.where; see export: docs/captures.md"
    for message in (f"convert: {why}", f"export: no; convert: {why}; as-is: no", f"as-is: no; try it; convert: {why}"):
        assert refused({"portable": "trace: no", "inductor-frozen": message}) == Migration(possible=False, reason=why)


def test_model_without_conversion_has_no_migration() -> None:
    exported = replace(CONVERTED, capture="export")
    assert compare([replace(LEGACY, capture="trace"), exported], None, QUICK) is None
    assert refused({"portable": "export: no"}) is None


def frozen_file(model: nn.Module, folder: Path) -> FreezeResult:
    """Freeze a TorchScript file without its source."""
    with torchscript_deprecations_silenced():
        torch.jit.save(torch.jit.script(model.eval()), folder / "legacy.pt")
        legacy = torch.jit.load(folder / "legacy.pt")
    return freeze(
        legacy,
        {"x": random_inputs(2, 4)},
        out=folder / "out",
        options=replace(QUICK_OPTIONS, recipes=["inductor-frozen", "torchscript-frozen"]),
    )


def test_converted_file_competes_as_inductor(tmp_path: Path) -> None:
    result = frozen_file(mlp(), tmp_path)
    assert result.judgement is not None
    by_recipe = {trial.candidate.recipe: trial for trial in result.judgement.trials}
    assert by_recipe["inductor-frozen"].candidate.capture == "convert"
    assert by_recipe["torchscript-frozen"].candidate.capture == "as-is"
    assert all(trial.problem is None for trial in by_recipe.values())
    assert result.artifact is not None
    manifest = result.artifact.manifest
    stored = manifest.freezing.migration
    assert stored is not None
    assert (stored.possible, stored.recipe, stored.against) == (True, "inductor-frozen", "torchscript-frozen")
    assert (stored.gain or 0) > 0
    assert 0 <= (stored.relative_rms_diff or 0) < 1e-5
    (row,) = [text for name, text in describe(manifest) if name == "migration"]
    assert row.startswith(f"converted to an exported program, inductor-frozen is {stored.gain:.2f} times as fast as")
    assert row in str(manifest_markdown(manifest))


def test_unconvertible_file_is_frozen_as_torchscript(tmp_path: Path) -> None:
    result = frozen_file(Halving(), tmp_path)
    assert result.verdict == "published"
    assert result.artifact is not None
    stored = result.artifact.manifest.freezing.migration
    assert stored is not None
    assert not stored.possible
    assert result.failures["inductor-frozen"] == f"convert: {stored.reason}"
    (row,) = [text for name, text in describe(result.artifact.manifest) if name == "migration"]
    assert row == f"the TorchScript is not converted to an exported program: {stored.reason}"
