"""Reports: their JSON form, which the manifest holds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from freezer.artifact.freezing_report import MAX_LISTED, Change, FreezingReport, KeptTensor, PreservedName

REPORT = FreezingReport(
    ops_before={"aten::conv2d": 2, "aten::batch_norm": 2},
    ops_after={"aten::conv2d": 2},
    changes=(Change(name="batch norms folded into convolutions", count=2),),
    changes_at_load=(Change(name="linear layers pretransposed", count=1, note="at load"),),
    num_constants=8,
    constants_bytes=640,
    constants=("conv.weight", "conv.bias"),
    folded_bytes=128,
    kept=(KeptTensor(name="count", reason="a call changes it"),),
    unused=("spare",),
    preserved=(PreservedName(name="reset", kind="method", why="asked for"),),
    size_before_bytes=700,
    size_after_bytes=900,
    phases_s={"capture": 0.5, "freeze": 0.25},
    memory_peak_bytes=1_000_000,
    guards=("batch is at least 2",),
    instructions={"avx": 12, "fma": 3},
    instructions_of="cpu-x86-64-v3",
    notes=("a note",),
)


def test_a_report_round_trips_through_json() -> None:
    assert FreezingReport.from_json(json.loads(json.dumps(REPORT.to_json()))) == REPORT
    assert FreezingReport.from_json(json.loads(json.dumps(FreezingReport().to_json()))) == FreezingReport()
    assert json.loads(json.dumps(REPORT.to_json())) == REPORT.to_json(), "a manifest is the same before and after it is written"


def test_a_report_of_another_release_is_read() -> None:
    data: dict[str, Any] = {"ops_before": {"aten::relu": 1}, "invented_later": 3}
    assert FreezingReport.from_json(data) == FreezingReport(ops_before={"aten::relu": 1})


@pytest.mark.parametrize("field", ["constants", "unused", "guards", "notes"])
def test_a_long_list_is_cut_and_says_so(field: str) -> None:
    listed = FreezingReport(**{field: tuple(f"item {i}" for i in range(MAX_LISTED + 37))}).to_json(max_listed=MAX_LISTED)[field]  # type: ignore[arg-type]
    assert len(listed) == MAX_LISTED + 1
    assert listed[-1] == "and 37 more"


def test_nothing_is_cut_unless_asked_for() -> None:
    names = tuple(f"item {i}" for i in range(MAX_LISTED + 37))
    assert FreezingReport.from_json(FreezingReport(constants=names).to_json()).constants == names


def test_a_long_list_of_reasons_is_cut_and_still_read() -> None:
    kept = tuple(KeptTensor(name=f"b{i}", reason="a call changes it") for i in range(MAX_LISTED + 2))
    preserved = tuple(PreservedName(name=f"p{i}", kind="method", why="asked for") for i in range(MAX_LISTED + 3))
    read = FreezingReport.from_json(FreezingReport(kept=kept, preserved=preserved).to_json(max_listed=MAX_LISTED))
    assert read.kept[-1] == KeptTensor(name="and 2 more", reason="not listed")
    assert read.preserved[-1] == PreservedName(name="and 3 more", kind="attribute", why="not listed")
