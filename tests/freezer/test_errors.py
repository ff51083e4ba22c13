"""Errors: pickling, codes, and the tree in the docstring."""

from __future__ import annotations

import pickle

import pytest

from freezer import errors
from freezer.errors import CatalogError, ColdpressError, FreezeError, IncompatibleError, Refusal

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, ColdpressError)
]


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_survive_pickling(kind: type[ColdpressError]) -> None:
    error = kind("what, got, expected, remedy")
    assert error.code.startswith("CP-")
    error.code = "CP-FINER"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.coded, again.args) == ("CP-FINER: what, got, expected, remedy", error.args)


def test_attributes_survive_pickling() -> None:
    catalog = pickle.loads(pickle.dumps(CatalogError("is wrong", entry="bert", field="dims.batch")))
    assert str(catalog) == "entry 'bert', field 'dims.batch': is wrong"
    assert (catalog.entry, catalog.field) == ("bert", "dims.batch")
    ladder = (Refusal(rung="portable", reason="canary", got="1", expected="2"),)
    assert pickle.loads(pickle.dumps(IncompatibleError("no rung", ladder))).ladder == ladder
    assert str(ladder[0]) == "portable: canary: got 1, expected 2"


def test_kinds_and_codes_differ() -> None:
    for names in (
        [kind.kind for kind in CLASSES if issubclass(kind, FreezeError)],
        [kind.code for kind in CLASSES],
    ):
        assert len(set(names)) == len(names)


def test_the_docstring_lists_every_error() -> None:
    assert errors.__doc__ is not None
    assert [kind.__name__ for kind in CLASSES if kind.__name__ not in errors.__doc__] == []
