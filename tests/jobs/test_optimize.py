"""Exit codes of jobs.optimize for errors before and after the campaign."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import jobs.optimize
from pipeline.config import Config
from pipeline.reporting.campaign_report import CampaignReport


def test_an_unwritable_json_file_exits_with_3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def finished(config: Config, display: object) -> CampaignReport:
        (tmp_path / "folder").touch()
        return CampaignReport(campaign="c", started=0.0, finished=1.0, outcomes=())

    monkeypatch.setattr(jobs.optimize, "run", finished)
    done = CliRunner().invoke(jobs.optimize.app, [str(tmp_path / "c.yaml"), "--json", str(tmp_path / "folder" / "out.json")])
    assert done.exit_code == 3
    assert re.fullmatch(r"CP-INFRASTRUCTURE: .*cannot be written: .*\n", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            [],
            r"RAY_ADDRESS 'http://head:8265' is that of a dashboard, .* `python -m jobs.submit .*, unset it for a local Ray",
        ),
        (
            ["--address", "https://h:1"],
            r"--address 'https://h:1' is that of a dashboard, .* leave it out for a local Ray, or set .*",
        ),
    ],
)
def test_the_address_of_a_dashboard_is_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], said: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    done = CliRunner().invoke(jobs.optimize.app, ["catalog.yaml", "--store", str(tmp_path / "store"), *arguments])
    assert done.exit_code == 2
    assert re.match(f"CP-USAGE: {said}", done.stderr), done.stderr
    assert not (tmp_path / "store").exists()
