"""Tracking: campaigns and the model registry in MLflow, projected from the ledger. The only package
that imports mlflow.

May import: pipeline.cluster and below.
Read first: projection.py.
"""

from pipeline.tracking.campaign_summary import CampaignEnd, CampaignStart, outcomes_digest
from pipeline.tracking.connection import (
    DEFAULT_URI,
    MODELS,
    check_database,
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
)
from pipeline.tracking.source_models import (
    RegistryModel,
    download,
    list_registry,
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
    "CampaignEnd",
    "CampaignStart",
    "Described",
    "RegistryModel",
    "Tracker",
    "TrackerProcess",
    "check_database",
    "default_tracking_uri",
    "describe",
    "download",
    "gains_link",
    "list_registry",
    "outcomes_digest",
    "replay",
    "resolve_model",
    "slug",
]
