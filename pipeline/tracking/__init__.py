"""Tracking: campaigns and the model registry in MLflow, projected from the ledger. The only package
that imports mlflow.

May import: pipeline.cluster and below.
Read first: projection.py.
"""

from pipeline.tracking.campaign_summary import outcomes_digest
from pipeline.tracking.connection import (
    DEFAULT_URI,
    MODELS,
    check_database,
    database_file,
    default_tracking_uri,
)
from pipeline.tracking.mlmodel import (
    Described,
    describe,
    slug,
)
from pipeline.tracking.process import (
    TrackerProcess,
)
from pipeline.tracking.projection import (
    gains_link,
)
from pipeline.tracking.registry import (
    ArtifactMode,
    aliased_artifacts,
    move_aliases,
)
from pipeline.tracking.source_models import (
    RegistryModel,
    download,
    list_registry,
    registry_events,
    resolve_model,
)
from pipeline.tracking.tracker import (
    Tracker,
    replay,
)

__all__ = [
    "DEFAULT_URI",
    "MODELS",
    "ArtifactMode",
    "Described",
    "RegistryModel",
    "Tracker",
    "TrackerProcess",
    "aliased_artifacts",
    "check_database",
    "database_file",
    "default_tracking_uri",
    "describe",
    "download",
    "gains_link",
    "list_registry",
    "move_aliases",
    "outcomes_digest",
    "registry_events",
    "replay",
    "resolve_model",
    "slug",
]
