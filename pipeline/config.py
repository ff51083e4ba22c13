"""Configuration of a campaign, from Python or the command `coldpress optimize`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from pathlib import Path

from freezer.codec import frozen
from freezer.errors import UsageError, without_credentials
from freezer.freezing.choices import select
from freezer.hardware import device_class
from freezer.spec import SamplingPolicy
from pipeline.catalog import PYTHON, CatalogEntry, is_registry
from pipeline.cluster import check_address, joined_address
from pipeline.ledger import check_campaign, refuse_registry
from pipeline.tracking import ArtifactMode, check_database, default_tracking_uri


@frozen
class Config:
    """Configuration of a campaign.

    Attributes:
        catalog: path of the catalog, `mlflow:` for a whole registry, or entries.
        filter_string: selects the models of a registry, in MLflow's syntax.
        trust: whether pickled models of a registry may be loaded.
        store, tracking_uri: receive artifacts and records; by default `./store`, and
            MLFLOW_TRACKING_URI or `sqlite:///mlflow.db`.
        address: of a Ray cluster; None takes RAY_ADDRESS, or starts one on this machine.
        campaign: its name, by default the catalog's; the same name continues the same campaign.
        device_classes, recipes: replace those of the entries; empty keeps theirs.
        only: globs over entry names; empty takes every entry.
        keep_going: run the good entries if others are bad.
        lift_quarantine: retry what crashed or hung in earlier campaigns.
        allow_regression: publish what is slower, or drifts more, than the artifact that serves now.
        mlflow_artifacts: whether MLflow stores artifacts or references.
        policy: of sampling.
        wait_s: how long to wait for nodes of a class that has none; None does not wait.
    """

    catalog: str | Path | Sequence[CatalogEntry]
    store: str = "./store"
    tracking_uri: str = field(default_factory=default_tracking_uri)
    campaign: str = ""
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "campaign", self.campaign or _name_of(self.catalog_name))

    @property
    def entries(self) -> Sequence[CatalogEntry] | None:
        """The entries of a catalog of Python objects."""
        return None if isinstance(self.catalog, str | Path) else self.catalog

    @property
    def catalog_name(self) -> str:
        """The catalog, for people."""
        return str(self.catalog) if isinstance(self.catalog, str | Path) else PYTHON

    @property
    def files(self) -> Path:
        """The catalog's file, or the working directory, to which paths of entries are relative."""
        if self.entries is not None or is_registry(self.catalog_name):
            return Path.cwd()
        return Path(self.catalog_name).absolute()

    @property
    def places(self) -> str:
        """The tracking server, the store and the cluster, for people."""
        joined = joined_address(self.address)
        ray = f"Ray at {joined}" if joined else "Ray on this machine"
        tracked = without_credentials(self.tracking_uri)
        return f"MLflow {tracked}, store {without_credentials(self.store)}, {ray}"

    def check(self) -> None:
        """Check what the machine of the driver does not decide.

        Raises:
            UsageError: a name, a class or a recipe is invalid, a setting of registries is given for
                another catalog, or the store has no ledger.
        """
        check_campaign(self.campaign)
        refuse_registry(self.store)
        select(self.recipes, portable=False)
        for name in self.device_classes:
            if name != "auto":
                device_class(name)
        if not is_registry(self.catalog_name):
            for option, given in (("filter", self.filter_string), ("trust", self.trust)):
                if given:
                    raise UsageError(f"--{option} only applies to `mlflow:` catalogs")

    def check_places(self) -> None:
        """Check the address and the tracking URI.

        Raises:
            UsageError: the address is not one that drivers use, or the database does not exist.
        """
        check_address(self.address)
        check_database(self.tracking_uri, create=not is_registry(self.catalog_name))


def _name_of(catalog: str) -> str:
    """The name of a campaign without one: its catalog's."""
    if is_registry(catalog):
        return "-".join(("mlflow", *catalog.removeprefix("mlflow:").strip("@/").lower().split()))
    return Path(catalog).stem.lower()
