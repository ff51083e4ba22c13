"""The freezing report of a manifest: long lists are cut."""

from __future__ import annotations

from freezer.artifact import FreezingReport, KeptTensor
from freezer.codec import decode


def test_long_lists_are_cut() -> None:
    kept = tuple(KeptTensor(name=f"b{i}", reason="a call changes it") for i in range(12))
    report = FreezingReport(
        kept=kept, unused=tuple(f"u{i}" for i in range(137)), guards=("one",), notes=("two",)
    )
    assert report.shortened(12).kept == kept
    short = report.shortened(10)
    assert (short.kept, short.unused[-1], short.guards) == (kept[:10], "u9", ("one",))
    assert short.notes == ("two", "Only the first 10 are listed of 12 kept, 137 unused.")


def test_reports_of_later_releases_are_read() -> None:
    data = {"ops_before": {"aten::relu": 1}, "invented_later": 3}
    assert decode(FreezingReport, data, origin="here") == FreezingReport(
        ops_before={"aten::relu": 1}
    )
