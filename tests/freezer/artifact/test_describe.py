"""Descriptions of artifacts: rows of `inspect`, the page freezing.md, and shortened reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from freezer.artifact import CandidateRecord, FreezingRecord, FreezingReport, LatencyRecord
from freezer.artifact.description import describe
from tests.support.steps import write_plain_artifact

FREEZING = FreezingRecord(
    build_s=1.5,
    warnings=("TracerWarning: a size at model.py:4: if n:",),
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


def test_figures_of_disturbed_rounds_are_marked(tmp_path: Path) -> None:
    """Those of the winner and of the candidates that lost."""
    latency = LatencyRecord(
        point={}, num_threads=1, speedup=1.5, speedup_ci=(1.1, 2.0), clock="disturbed"
    )
    noisy = write_plain_artifact(tmp_path, latency=latency, freezing=FREEZING).manifest
    assert "speedup ~1.25 over eager" in dict(describe(noisy))["candidate"]
    assert dict(describe(noisy))["speed"].startswith("~1.50x (1.10 to 2.00)")
    quiet = replace(noisy, latency=replace(latency, clock="cpu"))
    assert "~" not in str(dict(describe(quiet)))


def test_cut_lists_are_counted_in_a_note() -> None:
    report = FreezingReport(unused=tuple(f"u{i}" for i in range(137)), guards=("one",))
    short = report.shortened(10)
    assert (short.unused[-1], short.guards, len(short.notes)) == ("u9", ("one",), 1)
    assert "137" in short.notes[0]
    assert report.shortened(137) == report
