"""An empty store, ledger and MLflow for each test that needs one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from freezer.store import Store
from pipeline.ledger import Ledger
from tests.support.shown import empty_database


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
