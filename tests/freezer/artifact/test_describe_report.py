"""Reports of a freeze in words: rows, and the Markdown page."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from freezer.artifact.describe import describe
from freezer.artifact.describe_report import describe_freezing, describe_report, listed, size_text
from freezer.artifact.freezing_report import MAX_LISTED, Change, FreezingReport, KeptTensor, PreservedName
from freezer.artifact.markdown import freezing_markdown, manifest_markdown
from freezer.artifact.sections import CandidateRecord, FreezingRecord, Migration, RecipeRecord
from tests.steps import write_plain_artifact

REPORT = FreezingReport(
    ops_before={"aten::conv2d": 2, "aten::batch_norm": 2, "aten::relu": 2, "aten::add_": 1},
    ops_after={"aten::conv2d": 2, "aten::relu": 2, "aten::add_": 1},
    changes=(Change(name="batch norms folded into convolutions", count=2),),
    changes_at_load=(Change(name="linear layers pretransposed", count=1, note="weights are kept twice"),),
    num_constants=12,
    constants_bytes=2_400_000,
    constants=tuple(f"conv{i}.weight" for i in range(12)),
    folded_bytes=1_200_000,
    kept=(
        KeptTensor(name="count", reason="`forward` sets it at model.py:12: self.count = a | b"),
        KeptTensor(name="spare", reason="asked for"),
    ),
    unused=("bn.num_batches_tracked",),
    preserved=(
        PreservedName(name="reset", kind="method", why="asked for"),
        PreservedName(name="count", kind="attribute", why="`forward` sets it at model.py:12: self.count = a | b"),
    ),
    size_before_bytes=2_500_000,
    size_after_bytes=2_600_000,
    phases_s={"save": 0.125, "report": 0.25, "capture": 1.5, "freeze": 0.5},
    memory_peak_bytes=150_000_000,
    guards=("batch is at least 2",),
    instructions={"fma": 3, "avx": 12},
    instructions_of="cpu-x86-64-v3",
    notes=("Something is worth knowing.",),
)
TRIED = (
    {"payload": "all", "capture": "export", "lowering": "torchscript", "outcome": "a branch | on a value at model.py:3: if x:"},
    {"payload": "all", "capture": "trace", "lowering": "torchscript", "outcome": "captured and lowered"},
)
FREEZING = FreezingRecord(
    build_s=1.5,
    reports={"payloads/all.pt": REPORT},
    strides_equal=True,
    candidates=(
        CandidateRecord(
            recipe="inductor-frozen",
            capture="export",
            lowering="inductor",
            size_bytes=3_000_000,
            problem="output 'y', input set 0: error_ratio 41 > 3",
            speedup=None,
            error_ratio=41.0,
        ),
        CandidateRecord(
            recipe="torchscript-optimized",
            capture="trace",
            lowering="torchscript",
            size_bytes=3_000,
            problem=None,
            speedup=1.25,
            error_ratio=1.5,
        ),
    ),
    failures={"inductor-unpacked": "no compiler"},
)
RECIPE = RecipeRecord(name="torchscript-frozen", capture="trace", lowering="torchscript", settings={}, tried=TRIED)


def test_rows_of_a_report() -> None:
    rows = list(describe_report(REPORT))
    assert rows[:3] == [
        ("operators", "7 -> 5: aten::batch_norm 2 -> 0, aten::conv2d 2, aten::relu 2, aten::add_ 1"),
        ("done", "batch norms folded into convolutions 2"),
        ("done at load", "linear layers pretransposed 1 (weights are kept twice)"),
    ]
    assert ("stays", "method reset: asked for") in rows
    assert ("stays", "attribute count: `forward` sets it at model.py:12: self.count = a | b") in rows
    assert ("stays", "spare: asked for") in rows
    assert sum("count" in value for name, value in rows if name == "stays") == 1, "one row per kept buffer"
    said = dict(rows)
    assert said["constants"].startswith(
        "12 parameters and buffers, 2.4 MB; folding computed 1.2 MB of new constants: conv0.weight, "
    )
    assert said["constants"].endswith(" and 4 more")
    assert said["time"] == "capture 1.50 s, freeze 0.50 s, save 0.12 s, report 0.25 s"
    assert said["instructions"] == "avx fma (of cpu-x86-64-v3)"
    assert "instructions" not in dict(describe_report(replace(REPORT, instructions_of=""))), "a payload without machine code"
    assert said["build memory"] == "peak 150.0 MB"
    assert (said["guard"], said["note"]) == ("batch is at least 2", "Something is worth knowing.")


@pytest.mark.parametrize(
    ("after", "row"),
    [
        ({f"aten::op{i}": 20 - i for i in range(12)}, "174, as before: aten::op0 20"),
        ({"aten::op0": 20}, "aten::op7 13 -> 0, 4 other kinds 42 -> 0"),
    ],
)
def test_rows_of_operators(after: dict[str, int], row: str) -> None:
    report = FreezingReport(ops_before={f"aten::op{i}": 20 - i for i in range(12)}, ops_after=after)
    assert row in dict(describe_report(report))["operators"]


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(124, "124 bytes"), (12_345, "12.3 kB"), (100_000, "0.1 MB"), (2_500_000, "2.5 MB")]
)
def test_size_text(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


@pytest.mark.parametrize(
    ("number", "ending"), [(8, "n7"), (9, "n7 and 1 more"), (MAX_LISTED + 37, f"n7 and {MAX_LISTED + 29} more")]
)
def test_shortened_lists_count_all_names(number: int, ending: str) -> None:
    names = FreezingReport(unused=tuple(f"n{i}" for i in range(number))).shortened().unused
    assert listed(names).endswith(ending)


def test_rows_of_attempts_and_losers() -> None:
    rows = list(describe_freezing(FREEZING, RECIPE))
    assert rows[1] == ("tried", "all: trace -> torchscript: captured and lowered")
    assert ("strides", "of all outputs equal to eager's") in rows
    assert rows[-3:] == [
        ("candidate", "inductor-frozen (export -> inductor, 3.0 MB): output 'y', input set 0: error_ratio 41 > 3"),
        (
            "candidate",
            "torchscript-optimized (trace -> torchscript, 3.0 kB): passes, speedup 1.25 over eager, error ratio 1.50",
        ),
        ("not built", "inductor-unpacked: no compiler"),
    ]


def test_each_payload_has_its_rows() -> None:
    two = replace(FREEZING, reports={"payloads/batch1.pt2": REPORT, "payloads/all.pt2": REPORT})
    names = [value for name, value in describe_freezing(two, RECIPE) if name == "frozen"]
    assert names == ["payloads/batch1.pt2", "payloads/all.pt2"]


def test_docs_explain_every_row() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reports.md").read_text()
    table = page.partition("## The rows of `coldpress inspect`")[2].partition("\n## ")[0]
    explained = [
        name for line in table.splitlines() for name in re.findall(r"`([a-z ]+)`", line.split("|")[1] if "|" in line else "")
    ]
    full = replace(
        FREEZING,
        reports={"payloads/batch1.pt2": REPORT, "payloads/all.pt2": REPORT},
        migration=Migration(possible=False, reason="it does not take prim::If"),
    )
    assert sorted(explained) == sorted({name for name, _ in describe_freezing(full, RECIPE)})


def test_manifests_without_reports(tmp_path: Path) -> None:
    manifest = write_plain_artifact(tmp_path).manifest
    assert not {"operators", "strides", "candidate"} & {name for name, _ in describe(manifest)}
    assert manifest_markdown(manifest) is None
    page = manifest_markdown(replace(manifest, freezing=FREEZING))
    assert page is not None
    assert page.startswith("# What freezing did: tiny for portable, portable\n\npublished: not timed, error ratio 1.25\n")


def test_the_markdown_page(golden: Callable[[str, bytes], bytes]) -> None:
    page = freezing_markdown(
        title="tiny for cpu-x86-64-v3, torchscript-frozen",
        verdict="Passes: speedup 2.00 over eager, error ratio 1.25",
        tried=TRIED,
        reports={"payloads/all.pt": REPORT},
        strides_equal=True,
    ).encode()
    assert page == golden("freezing.md", page)
