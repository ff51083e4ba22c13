"""Every corner of TorchScript and torch.export ends as the page says, and what fails says so in a sentence with a remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.freezer.cases import RECIPES, failed, outcome_of, pairs, rows_of, variants
from tests.freezer.models_corners import CORNERS

ROWS = rows_of("Corners")


def test_the_page_has_a_row_for_every_model_and_no_other() -> None:
    assert sorted(ROWS) == sorted(CORNERS)


@pytest.mark.parametrize(("name", "recipe"), pairs("Corners", CORNERS))
def test_the_page_says_what_happens(name: str, recipe: str, tmp_path: Path) -> None:
    outcome = outcome_of(CORNERS[name], recipe, tmp_path / "candidate")
    assert outcome.cell == ROWS[name][recipe], outcome.message
    if failed(outcome.cell):
        assert re.search(CORNERS[name].reason(recipe, outcome.cell), outcome.message), outcome.message


@pytest.mark.parametrize(("name", "recipe"), variants("Corners", CORNERS))
def test_the_other_recipes_of_torchscript_take_the_same(name: str, recipe: str, tmp_path: Path) -> None:
    outcome = outcome_of(CORNERS[name], recipe, tmp_path / "candidate")
    assert outcome.cell == ROWS[name]["torchscript-frozen"], outcome.message


def test_what_fails_has_a_remedy_on_the_page() -> None:
    for name, row in ROWS.items():
        assert row["remedy"] or not any(failed(row[recipe]) for recipe in RECIPES), name
