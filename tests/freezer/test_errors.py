"""Errors: every one of them survives pickling, with what it carries."""

from __future__ import annotations

import pickle

import pytest

from freezer import errors
from freezer.errors import CatalogError, ColdpressError, ContractError, FreezeError, IncompatibleError, Refusal

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, ColdpressError)]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_survives_pickling(kind: type[ColdpressError]) -> None:
    again = pickle.loads(pickle.dumps(kind("what, got, expected, remedy")))
    assert type(again) is kind
    assert str(again) == "what, got, expected, remedy"


def test_a_catalog_error_keeps_its_entry_and_field() -> None:
    error = CatalogError("is wrong", entry="bert", field="dims.batch")
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(error))))
    assert str(again) == str(error) == "entry 'bert', field 'dims.batch': is wrong"
    assert (again.entry, again.field) == ("bert", "dims.batch")


def test_an_incompatible_error_keeps_its_ladder() -> None:
    ladder = (Refusal(rung="portable", reason="canary", got="1", expected="2"),)
    again = pickle.loads(pickle.dumps(IncompatibleError("no rung", ladder)))
    assert again.ladder == ladder
    assert str(ladder[0]) == "portable: canary: got 1, expected 2"


def test_kinds_of_failed_outcomes_differ() -> None:
    kinds = [kind.kind for kind in CLASSES if issubclass(kind, FreezeError)]
    assert len(set(kinds)) == len(kinds)


def test_misuse_of_a_call_is_a_value_error_too() -> None:
    assert issubclass(ContractError, ValueError)


def test_the_drawing_shows_every_error() -> None:
    assert errors.__doc__ is not None
    assert [kind.__name__ for kind in CLASSES if kind.__name__ not in errors.__doc__] == []


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_carries_a_code_that_survives_pickling(kind: type[ColdpressError]) -> None:
    error = kind("what")
    assert error.code.startswith("CP-")
    error.code = "CP-FINER"
    again = pickle.loads(pickle.dumps(error))
    assert again.coded == "CP-FINER: what"


def test_codes_of_classes_differ() -> None:
    codes = [kind.code for kind in CLASSES]
    assert len(set(codes)) == len(codes)
