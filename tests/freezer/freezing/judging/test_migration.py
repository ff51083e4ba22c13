"""Migration: speedup and difference of a converted TorchScript model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from freezer.artifact import Migration, PayloadKind, describe, manifest_markdown
from freezer.freezing.freeze import FreezeResult, freeze
from freezer.freezing.judging import Trial, refused
from freezer.freezing.judging.migration import compare
from freezer.freezing.recipes import CaptureName
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced
from freezer.timing import Sampling
from tests.support.models import Halving, mlp
from tests.support.steps import QUICK, QUICK_OPTIONS, random_inputs

OUTPUTS = [[random_inputs(3, 4, seed=seed)] for seed in range(3)]


def trial(
    recipe: str, capture: CaptureName, lowering: PayloadKind, problem: str | None = None
) -> Trial:
    candidate: Any = SimpleNamespace(recipe=recipe, capture=capture, lowering=lowering)
    return Trial(candidate=candidate, drift=None, problem=problem)


LEGACY = trial("torchscript-frozen", "as-is", "torchscript")
CONVERTED = trial("inductor-frozen", "convert", "inductor")


def compared(
    *trials: Trial, sampling: Sampling | None = None, off: float = 0.0
) -> Migration | None:
    outputs = {item.candidate.recipe: OUTPUTS for item in trials}
    outputs["inductor-frozen"] = [[tensors[0] + off] for tensors in OUTPUTS]
    return compare(trials, outputs, sampling, QUICK)


def test_gain_is_over_the_fastest_torchscript() -> None:
    samples_ms = {
        "torchscript-frozen": [[4.0] * 3, [4.2] * 3],
        "torchscript-optimized": [[2.0] * 3, [2.2] * 3],
        "inductor-frozen": [[1.0] * 3, [1.1] * 3],
    }
    sampling = Sampling(samples_ms=samples_ms, num_dropped=0, settled=True, stable=True)
    found = compared(
        LEGACY, trial("torchscript-optimized", "as-is", "torchscript"), CONVERTED, sampling=sampling
    )
    assert found is not None
    assert (found.possible, found.recipe, found.against) == (
        True,
        "inductor-frozen",
        "torchscript-optimized",
    )
    assert found.gain == pytest.approx(2.0)
    assert found.gain_ci is not None
    assert found.gain_ci[0] <= 2.0 <= found.gain_ci[1]


def test_difference_of_outputs() -> None:
    found = compared(LEGACY, CONVERTED, off=0.5)
    assert found is not None
    assert found.max_abs_diff == pytest.approx(0.5)
    everything = torch.cat([tensors[0] for tensors in OUTPUTS])
    assert found.relative_rms_diff == pytest.approx(
        0.5 / math.sqrt(float((everything**2).mean())), rel=1e-5
    )
    assert found.gain is None, "nothing was timed"


def test_rejected_conversion_has_a_reason() -> None:
    rejected = compared(LEGACY, trial("inductor-frozen", "convert", "inductor", "wrong"))
    assert rejected is not None
    assert (rejected.possible, rejected.reason) == (
        False,
        "inductor-frozen does not pass the drift gate",
    )


def test_model_without_conversion_has_no_migration() -> None:
    assert (
        compared(
            trial("torchscript-frozen", "trace", "torchscript"),
            trial("inductor-frozen", "export", "inductor"),
        )
        is None
    )
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
    assert (stored.possible, stored.recipe, stored.against) == (
        True,
        "inductor-frozen",
        "torchscript-frozen",
    )
    assert (stored.gain or 0) > 0
    assert 0 <= (stored.relative_rms_diff or 0) < 1e-5
    (row,) = [text for name, text in describe(manifest) if name == "migration"]
    assert row.startswith(
        f"converted to an exported program, inductor-frozen is {stored.gain:.2f} times as fast as"
    )
    assert row[1:] in str(manifest_markdown(manifest))


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
