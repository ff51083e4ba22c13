"""A real sqlite MLflow: one database for a module, and a campaign of its own for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import mlflow
import pytest
import torch
from torch import nn

from freezer.artifact.folder import Artifact
from freezer.freezing.freeze import freeze
from freezer.freezing.options import FreezeOptions
from freezer.limits import SamplingPolicy
from freezer.spec.inputs import Dim
from pipeline.tracking.projection import Projection
from tests.pipeline.tracking.outcomes import X


@pytest.fixture(scope="session")
def source() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


@pytest.fixture(scope="session")
def artifact(source: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A real portable artifact, batch 1 to 8."""
    result = freeze(
        source,
        {"input": torch.from_numpy(X)},
        out=tmp_path_factory.mktemp("artifact"),
        dims={"input": {0: Dim(name="batch", min=1, max=8)}},
        options=FreezeOptions(
            name="tiny",
            device_class="portable",
            policy=SamplingPolicy(time_limit_s=0.3, warmup_s=0.1, min_rounds=1, busy_limit=2.0, steal_limit=2.0),
        ),
    )
    assert result.artifact is not None, result.reason
    return result.artifact


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    before = os.environ.get("MLFLOW_TRACKING_URI")
    yield f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    mlflow.set_tracking_uri(before)


@pytest.fixture
def projection(uri: str, request: pytest.FixtureRequest) -> Projection:
    """Of a campaign that is named as the test."""
    opened = Projection.open(uri, request.node.name)
    opened.start("catalog.yaml", 1_700_000_000.0)
    return opened
