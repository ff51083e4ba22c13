"""The exit codes of jobs.optimize for what ends a campaign before, or after, it has a report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import jobs.optimize
from freezer.errors import CatalogError, ColdpressError, InfrastructureError, IntegrityError, StoreUnreachableError
from pipeline.config import Config
from pipeline.reporting.campaign_report import CampaignReport


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CatalogError("no such file"), 2),
        (InfrastructureError("Ray is down"), 3),
        (StoreUnreachableError("the disk is gone"), 3),
        (IntegrityError("store/mlp/index.json is damaged"), 3),
    ],
)
def test_what_ends_a_campaign_is_one_line_and_a_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: ColdpressError, code: int
) -> None:
    def ended(config: Config, display: object) -> None:
        raise error

    monkeypatch.setattr(jobs.optimize, "run", ended)
    done = CliRunner().invoke(jobs.optimize.app, [str(tmp_path / "catalog.yaml")])
    assert done.exit_code == code
    assert done.stderr == f"{error.coded}\n"


def test_a_json_file_that_cannot_be_written_is_one_line_and_a_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def finished(config: Config, display: object) -> CampaignReport:
        (tmp_path / "folder").touch()  # after the check at the start
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
            r"--address 'https://h:1' is that of a dashboard, .* leave it out for a local Ray, or name .*",
        ),
    ],
)
def test_the_address_of_a_dashboard_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], said: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    done = CliRunner().invoke(jobs.optimize.app, ["catalog.yaml", "--store", str(tmp_path / "store"), *arguments])
    assert done.exit_code == 2
    assert re.match(f"CP-USAGE: {said}", done.stderr), done.stderr
    assert not (tmp_path / "store").exists()
