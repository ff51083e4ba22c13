"""Descriptions of artifacts: rows of `inspect`, the page freezing.md, and shortened reports."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from freezer.artifact import (
    CandidateRecord,
    Change,
    FreezingRecord,
    FreezingReport,
    KeptTensor,
    LatencyRecord,
    PreservedName,
    describe,
    describe_freezing,
    manifest_markdown,
)
from tests.support.steps import write_plain_artifact

REPORT = FreezingReport(
    ops_before={"aten::conv2d": 2, "aten::batch_norm": 2, "aten::relu": 2, "aten::add_": 1},
    ops_after={"aten::conv2d": 2, "aten::relu": 2, "aten::add_": 1},
    changes=(Change(name="batch norms folded into convolutions", count=2),),
    num_constants=12,
    constants_bytes=2_400_000,
    constants=tuple(f"conv{i}.weight" for i in range(12)),
    folded_bytes=1_200_000,
    kept=(
        KeptTensor(name="count", reason="`forward` sets it at model.py:12: self.count = a | b"),
        KeptTensor(name="spare", reason="requested"),
    ),
    unused=("bn.num_batches_tracked",),
    preserved=(
        PreservedName(name="reset", kind="method", why="requested"),
        PreservedName(
            name="count",
            kind="attribute",
            why="`forward` sets it at model.py:12: self.count = a | b",
        ),
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
    {
        "payload": "all",
        "capture": "export",
        "lowering": "torchscript",
        "outcome": "a branch | on a value at model.py:3: if x:",
    },
    {
        "payload": "all",
        "capture": "trace",
        "lowering": "torchscript",
        "outcome": "captured and lowered",
    },
)
FREEZING = FreezingRecord(
    build_s=1.5,
    warnings=("TracerWarning: a size at model.py:4: if n:",),
    reports={"payloads/all.pt": REPORT},
    strides_equal=True,
    candidates=(
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


def test_docs_explain_every_row() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "see-what-freezing-did.md").read_text()
    table = page.partition("## The rows of `coldpress inspect`")[2].partition("\n## ")[0]
    explained = [
        name
        for line in table.splitlines()
        for name in re.findall(r"`([a-z ]+)`", line.split("|")[1] if "|" in line else "")
    ]
    full = replace(
        FREEZING,
        strides_equal=False,
        reports=dict.fromkeys(
            ("payloads/batch1.pt2", "payloads/all.pt2"), replace(REPORT, unused=())
        ),
    )
    assert sorted(explained) == sorted({name for name, _ in describe_freezing(full, TRIED)})


def test_figures_of_disturbed_rounds_are_marked(tmp_path: Path) -> None:
    """Those of the winner and of the candidates that lost."""
    latency = LatencyRecord(
        point={}, num_threads=1, speedup=1.5, speedup_ci=(1.1, 2.0), clock="disturbed"
    )
    noisy = write_plain_artifact(tmp_path, latency=latency, freezing=FREEZING).manifest
    assert "speedup ~1.25 over eager" in dict(describe(noisy))["candidate"]
    assert dict(describe(noisy))["speed"].startswith("~1.50x (1.10 to 2.00)")
    assert str(manifest_markdown(noisy)).count("speedup ~1.") == 2
    quiet = replace(noisy, latency=replace(latency, clock="cpu"))
    assert "~" not in str(manifest_markdown(quiet))


def test_cut_lists_are_counted_in_a_note() -> None:
    report = FreezingReport(unused=tuple(f"u{i}" for i in range(137)), guards=("one",))
    short = report.shortened(10)
    assert (short.unused[-1], short.guards, len(short.notes)) == ("u9", ("one",), 1)
    assert "137" in short.notes[0]
    assert report.shortened(137) == report
