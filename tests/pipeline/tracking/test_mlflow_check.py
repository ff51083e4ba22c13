"""MLflow as `coldpress doctor` finds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from freezer.checks import CheckRequest, Finding
from pipeline.tracking.connection import check_mlflow
from tests.support.raylets import LOOPBACK, free_port


def finding(tracking_uri: str | None) -> Finding:
    (found,) = check_mlflow(CheckRequest(tracking_uri=tracking_uri))
    return found


def test_a_database_that_answers_or_will_be_made(uri: str, tmp_path: Path) -> None:
    assert finding(None).level == "ok"
    assert (finding(uri).level, finding(uri).text.endswith("answers")) == ("ok", True)
    missing = tmp_path / "new" / "mlflow.db"
    assert finding(f"sqlite:///{missing}").level == "ok"
    assert not missing.parent.exists()


def test_mlflow_that_does_not_answer(tmp_path: Path) -> None:
    server = f"http://{LOOPBACK}:{free_port()}"
    found = finding(server)
    assert (found.level, f"curl -i {server}/health" in found.remedy) == ("error", True)
    (tmp_path / "mlflow.db").write_text("no database" * 100)
    assert f"ls -ld {tmp_path}/mlflow.db" in finding(f"sqlite:///{tmp_path}/mlflow.db").remedy
    assert finding("./mlruns").level == "error"


@pytest.mark.parametrize("server", ["http://me:secret@127.0.0.1:1"])
def test_passwords_are_hidden(server: str) -> None:
    found = finding(server)
    assert "secret@" not in found.text + found.remedy
