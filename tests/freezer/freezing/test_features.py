"""Every feature of a model is served as the page says, by the capture that it names, or is the outcome that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.freezer.cases import RECIPES, failed, outcome_of, pairs, rows_of, variants
from tests.freezer.models_features import FEATURES

ROWS = rows_of("Features")


def test_the_page_has_a_row_for_every_model_and_no_other() -> None:
    assert sorted(ROWS) == sorted(FEATURES)


@pytest.mark.parametrize(("name", "recipe"), pairs("Features", FEATURES))
def test_the_page_says_what_happens(name: str, recipe: str, tmp_path: Path) -> None:
    outcome = outcome_of(FEATURES[name], recipe, tmp_path / "candidate")
    assert outcome.cell == ROWS[name][recipe], outcome.message
    if failed(outcome.cell):
        assert re.search(FEATURES[name].reason(recipe, outcome.cell), outcome.message), outcome.message


OTHER_LAYOUT = "weights in channels-last layout"
OTHER_ROUNDING = "modules of several dtypes"
NOT_OPTIMIZED = {
    OTHER_LAYOUT: r"strides \(144, 36, 6, 1\), eager's are \(144, 1, 24, 4\)",
    OTHER_ROUNDING: r"max_abs_err .* \(float32, the reference is eager\)",
}
"""Where torch.jit.optimize_for_inference changes more than the gate lets pass, and what the judge says."""


@pytest.mark.parametrize(("name", "recipe"), variants("Features", FEATURES))
def test_the_other_recipes_of_torchscript_take_the_same_but_for_two(name: str, recipe: str, tmp_path: Path) -> None:
    outcome = outcome_of(FEATURES[name], recipe, tmp_path / "candidate")
    if recipe == "torchscript-optimized" and name in NOT_OPTIMIZED:
        assert outcome.cell == "rejected" or name == OTHER_ROUNDING, "how bfloat16 is rounded depends on the CPU"
        assert re.search(NOT_OPTIMIZED[name], outcome.message) or outcome.cell != "rejected", outcome.message
    else:
        assert outcome.cell == ROWS[name]["torchscript-frozen"], outcome.message


def test_what_fails_has_a_remedy_on_the_page() -> None:
    for name, row in ROWS.items():
        assert row["remedy"] or not any(failed(row[recipe]) for recipe in RECIPES), name
