"""Reports at the end of a campaign, and displays while it runs."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from freezer.artifact import UNMEASURED
from pipeline.records import CandidateReport, Failure, Outcome
from pipeline.reporting import CampaignReport, print_report
from pipeline.workspace import log_path
from tests.support.past_outcomes import FAILED, PUBLISHED


def report_of(*outcomes: Outcome, **settings: object) -> CampaignReport:
    return CampaignReport(
        campaign="c",
        started=1e9,
        finished=1e9 + 5,
        outcomes=outcomes,
        **settings,  # type: ignore[arg-type]
    )


def printed(report: CampaignReport, width: int = 200, store: str = "./store") -> str:
    console = Console(file=io.StringIO(), width=width)
    print_report(report, console, store)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (report_of(PUBLISHED), 0),
        (report_of(replace(PUBLISHED, verdict="kept-eager")), 0),
        (report_of(PUBLISHED, FAILED), 1),
        (report_of(replace(PUBLISHED, verdict="rejected")), 1),
        (report_of(replace(PUBLISHED, verdict="unstable")), 1),
        (report_of(PUBLISHED, FAILED, infrastructure=("MLflow: gone",)), 3),
        (report_of(replace(FAILED, failure=Failure(kind="infrastructure"))), 3),
        (report_of(FAILED, infrastructure=("MLflow: gone",), interrupted=True), 130),
    ],
)
def test_exit_codes(report: CampaignReport, code: int) -> None:
    assert report.exit_code == code


def test_json_report_has_every_outcome(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    report_of(PUBLISHED, FAILED).write_json(path)
    read = json.loads(path.read_text())
    assert read["started"] == "2001-09-09T01:46:40.000+00:00"
    assert [outcome["verdict"] for outcome in read["outcomes"]] == ["published", "failed"]
    assert {"campaign", "finished", "exit_code"} < read.keys()
    assert [outcome["warnings"] for outcome in read["outcomes"]] == [["w"], []]
    assert read["outcomes"][0]["speedup_ci"] == [1.79, 1.9]
    assert read["outcomes"][0]["drift"]["margin"] is None
    assert read["outcomes"][1]["latency_ms"] is None
    assert list(tmp_path.iterdir()) == [path]


def test_table_shows_verdicts_reasons_and_logs() -> None:
    untimed = replace(PUBLISHED, clock="none", figures=UNMEASURED)
    text = printed(report_of(PUBLISHED, FAILED, replace(PUBLISHED, cached=True)))
    assert "speed not measured" in printed(report_of(untimed))
    assert "1.84x (1.79-1.90)" in text
    assert any(line.split()[-1] == "unchanged" for line in text.splitlines())
    assert "broken cpu-x86-64-v4: the process died of SIGSEGV" in text
    assert "    line two" in text
    assert "1 failed, 2 published (1 unchanged) in 5 s" in text


def test_links_show_no_password() -> None:
    console = Console(file=io.StringIO(), width=160)
    uri = "http://me:secret@host:5000"
    print_report(report_of(PUBLISHED, experiment_id="7"), console, tracking_uri=uri)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("http://host:5000/#/experiments/7/runs" in text, "secret" in text) == (True, False)


def test_failure_is_printed_with_its_log(tmp_path: Path) -> None:
    failed = replace(
        FAILED, candidates=(CandidateReport(recipe="r", build_key="b", failure="crash"),)
    )
    assert "log:" not in printed(report_of(failed), store=str(tmp_path)), "it is gone"
    log = log_path(str(tmp_path), "b")
    log.parent.mkdir(parents=True)
    log.touch()
    assert printed(report_of(failed), store=str(tmp_path)).count(f"    log: {log}\n") == 1
    assert "    log: s3://bucket/store/.coldpress/logs/b.log\n" in printed(
        report_of(failed), store="s3://bucket/store"
    )
