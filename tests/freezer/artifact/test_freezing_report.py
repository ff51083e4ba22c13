"""Freezing reports: long lists are cut."""

from __future__ import annotations

import pytest

from freezer.artifact.freezing_report import MAX_LISTED, FreezingReport, KeptTensor, PreservedName
from freezer.codec import decode


@pytest.mark.parametrize("field", ["constants", "unused", "guards", "notes"])
def test_a_long_list_is_cut(field: str) -> None:
    names = [f"item {i}" for i in range(MAX_LISTED + 37)]
    report = decode(FreezingReport, {field: names, "invented_later": 3}, origin="here")
    listed = getattr(report.shortened(), field)
    assert (len(listed), listed[-1]) == (MAX_LISTED + 1, "and 37 more")


def test_long_lists_of_records_are_cut() -> None:
    kept = tuple(KeptTensor(name=f"b{i}", reason="a call changes it") for i in range(12))
    preserved = tuple(PreservedName(name=f"p{i}", kind="method", why="asked for") for i in range(13))
    short = FreezingReport(kept=kept, preserved=preserved).shortened(10)
    assert short.kept[-1] == KeptTensor(name="and 2 more", reason="not listed")
    assert short.preserved[-1] == PreservedName(name="and 3 more", kind="attribute", why="not listed")
