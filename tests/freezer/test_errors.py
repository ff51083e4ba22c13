"""Errors: pickling, codes, and the tree in the docstring."""

from __future__ import annotations

import pickle

import pytest

from freezer import errors
from freezer.errors import (
    CatalogError,
    ColdpressError,
    FreezeError,
    IncompatibleError,
    Refusal,
)

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
    assert (catalog.entry, catalog.field) == ("bert", "dims.batch")
    ladder = (Refusal(rung="portable", reason="canary", got="1", expected="2"),)
    assert pickle.loads(pickle.dumps(IncompatibleError("no rung", ladder))).ladder == ladder


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:s3cret@host/a.pt?sig=s3cret&x=1#s3cret: got", "https://host/a.pt got"),
        ("'s3://s3cret:s3cret@b/p?key=s3cret' and gs://b/p", "'s3://b/p' and gs://b/p"),
        ("https://me:p@s3cret?#@host/a@v1.pt", "https://host/a@v1.pt"),
        ("with url: /a.pt?token=s3cret (Caused by x)", "with url: /a.pt (Caused by x)"),
        ("torchscript:data/a?b.pt; is it?", "torchscript:data/a?b.pt; is it?"),
    ],
)
def test_credentials_in_urls_are_removed(text: str, shown: str) -> None:
    assert str(ColdpressError(text)) == shown


def test_kinds_and_codes_differ() -> None:
    kinds = [kind.kind for kind in CLASSES if issubclass(kind, FreezeError)]
    codes = [vars(kind)["code"] for kind in CLASSES if "code" in vars(kind)]
    assert len(set(kinds)) == len(kinds)
    assert len(set(codes)) == len(codes)
