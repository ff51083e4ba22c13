"""Configuration of a campaign."""

from __future__ import annotations

from dataclasses import dataclass, field

from freezer.limits import SamplingPolicy
from pipeline.tracking.registry import ArtifactMode


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All that a campaign is told.

    Attributes:
        catalog: path of the catalog, or `mlflow:` for a whole registry.
        filter_string: of a registry's models, as MLflow takes it.
        trust: whether a registry's pickled models may be loaded.
        store, tracking_uri: where artifacts and records go.
        address: of a Ray cluster; None starts one on this machine.
        campaign: a name; the same name goes on with the same campaign.
        device_classes, recipes: take the place of the entries' own; empty leaves them.
        only: a glob over names of entries.
        keep_going: let good entries run when others are bad.
        lift_quarantine: try again what crashed in earlier campaigns.
        explain: plan, say what would be done and why, and stop. Beside a driver of the campaign too: nothing is locked.
        mlflow_artifacts: whether MLflow holds whole artifacts, or references.
        policy: of sampling.
        wait_s: how long to wait for nodes of a class that has none; None is not at all.
    """

    catalog: str
    store: str
    tracking_uri: str
    campaign: str
    address: str | None = None
    device_classes: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()
    only: str | None = None
    filter_string: str | None = None
    trust: bool = False
    keep_going: bool = False
    lift_quarantine: bool = False
    explain: bool = False
    mlflow_artifacts: ArtifactMode = "copy"
    policy: SamplingPolicy = field(default_factory=SamplingPolicy)
    wait_s: float | None = None
