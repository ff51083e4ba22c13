"""A campaign in a real sqlite MLflow for every test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import mlflow
import pytest
from torch import nn

from freezer.artifact import Artifact
from pipeline.ledger import CampaignRecord
from pipeline.tracking.projection import Projection
from tests.conftest import Frozen
from tests.support.steps import HERE


@pytest.fixture(scope="session")
def source(portable: Frozen) -> nn.Module:
    return portable.model


@pytest.fixture(scope="session")
def artifact(portable: Frozen) -> Artifact:
    return portable.artifact


@pytest.fixture(scope="session")
def artifacts(scripted: Frozen, portable: Frozen) -> dict[str, Artifact]:
    """What judges of campaigns leave, by device class."""
    return {HERE: scripted.artifact, "portable": portable.artifact}


@pytest.fixture(scope="module", autouse=True)
def tracking_uri_restored() -> Iterator[None]:
    """Registering sets it for the process."""
    before = os.environ.get("MLFLOW_TRACKING_URI")
    yield
    mlflow.set_tracking_uri(before)


@pytest.fixture(autouse=True)
def search_path_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a registered version adds its code to Python's search path."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def projection(uri: str, request: pytest.FixtureRequest) -> Projection:
    """The projection of a campaign named like the test."""
    opened = Projection(uri, request.node.name)
    opened.start(CampaignRecord(catalog="catalog.yaml", started=1_700_000_000.0))
    return opened
