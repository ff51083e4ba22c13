"""An empty MLflow for each test that wants one."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.pipeline.shown import empty_database


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an empty database, mlflow.db: making one takes MLflow seconds."""
    folder = tmp_path_factory.mktemp("template")
    MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
    return folder


@pytest.fixture
def uri(template: Path, tmp_path: Path) -> str:
    """Of an empty database."""
    return empty_database(template, tmp_path / "mlflow")
