"""Configuration of a campaign."""

from __future__ import annotations

from dataclasses import dataclass, field

from freezer.spec import SamplingPolicy
from pipeline.tracking import ArtifactMode


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Configuration of a campaign.

    Attributes:
        catalog: path of the catalog, or `mlflow:` for a whole registry.
        filter_string: selects the models of a registry, in MLflow's syntax.
        trust: whether pickled models of a registry may be loaded.
        store, tracking_uri: receive artifacts and records.
        address: of a Ray cluster; None starts one on this machine.
        campaign: its name; the same name continues the same campaign.
        device_classes, recipes: replace those of the entries; empty keeps theirs.
        only: globs over entry names; empty takes every entry.
        keep_going: run the good entries if others are bad.
        lift_quarantine: retry what crashed in earlier campaigns.
        allow_regression: publish what is slower, or drifts more, than the artifact that serves now.
        mlflow_artifacts: whether MLflow stores artifacts or references.
        policy: of sampling.
        wait_s: how long to wait for nodes of a class that has none; None does not wait.
    """

    catalog: str
    store: str
    tracking_uri: str
    campaign: str
    address: str | None = None
    device_classes: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    filter_string: str | None = None
    trust: bool = False
    keep_going: bool = False
    lift_quarantine: bool = False
    allow_regression: bool = False
    mlflow_artifacts: ArtifactMode = "copy"
    policy: SamplingPolicy = field(default_factory=SamplingPolicy)
    wait_s: float | None = None
