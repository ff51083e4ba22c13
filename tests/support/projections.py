"""Runs and registered models of a projection of outcomes to MLflow."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

from mlflow.entities import Run

from freezer.artifact import Artifact
from pipeline.records import Outcome
from pipeline.tracking.projection import Projection
from pipeline.tracking.registry import Registration


def runs_of(projection: Projection, kind: str = "candidate") -> list[Run]:
    wanted = (
        f"tags.`coldpress.campaign` = '{projection.campaign}' AND tags.`coldpress.kind` = '{kind}'"
    )
    return list(projection.client.search_runs([projection.experiment_id], wanted))


def by_recipe(projection: Projection) -> dict[str, Run]:
    return {run.data.tags["coldpress.recipe"]: run for run in runs_of(projection)}


def registered(
    projection: Projection,
    item: Outcome,
    artifact: Artifact,
    *,
    serving: str = "portable",
    **changes: Any,
) -> None:
    """Register a copy of an artifact."""
    settings: dict[str, Any] = {
        "mode": "copy",
        "store_uri": str(Path("store").absolute()),
        **changes,
    }
    Registration(
        projection=projection,
        outcome=item,
        serving=serving,
        lay_out=partial(copied, artifact),
        rolled_back=lambda: False,
        **settings,
    ).register()


def copied(artifact: Artifact, folder: Path) -> Artifact:
    shutil.copytree(artifact.folder, folder, dirs_exist_ok=True)
    return Artifact.read(folder)
