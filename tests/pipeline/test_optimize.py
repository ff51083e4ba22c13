"""The exit codes of jobs.optimize for what ends a campaign before it has a report."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import jobs.optimize
from freezer.errors import CatalogError, ColdpressError, InfrastructureError, IntegrityError, StoreUnreachableError
from pipeline.run import Config


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
