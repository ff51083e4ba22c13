"""An empty store, ledger and MLflow for each test that needs one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from freezer.store import Store
from pipeline.ledger import Ledger
from tests.support.shown import empty_database


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


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), create=True)


@pytest.fixture
def ledger(store: Store) -> Iterator[Ledger]:
    with Ledger(store, "c") as opened:
        yield opened
