"""Model registry: published artifacts as versions of a registered model, with one alias for each
device class.

    create_logged_model -> log_model_artifacts -> finalize READY -> create_model_version -> set the
    alias

Deployments see only the last step. Every step can be repeated after a crash: an artifact gets one
version, and a broken upload is deleted. A registered version holds:

    MLmodel         python_function, loader_module freezer.pyfunc, data: artifact, and the signature
    code/freezer.zip   with requirements.txt and python_env.yaml: the environment of `mlflow models
                       serve`
    freezing.md        what freezing did, for people
    artifact/          the whole artifact folder; by reference only manifest.json and store.json
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlparse

from freezer.artifact import Artifact
from freezer.spec import MARKS
from pipeline.records import Outcome
from pipeline.tracking.connection import MODELS, named, reaching, upload
from pipeline.tracking.descriptions import model_description, version_description
from pipeline.tracking.model_files import DATA, write_model_files, write_reference
from pipeline.tracking.run_records import (
    ARTIFACT,
    CAMPAIGN,
    FROZEN,
    KIND,
    STORE,
    VERSION,
    free_tags,
)

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

    from pipeline.tracking.projection import Projection

ArtifactMode = Literal["copy", "reference"]
"""Whether MLflow stores whole artifacts, or references to the store."""

MODEL_VERSIONS = "mlflow.modelVersions"
"""Tag of a logged model with its versions, for MLflow's pages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """An artifact to register.

    Attributes:
        outcome: outcome with an artifact and a version.
        serving: device class of the artifact: the outcome's, or `portable` if eager is kept.
        lay_out: creates the artifact in an empty folder; called only if the artifact is not
            registered.
        run_id: run that made the artifact.
    """

    outcome: Outcome
    serving: str
    lay_out: Callable[[Path], Artifact]
    run_id: str | None = None


class Registry:
    """Registered models, as one campaign writes the outcomes of one model.

    Sets the tracking URI of the process: MLflow's registry looks logged models up there.

    Args:
        outcomes: outcomes of the model.
        mode: whether to upload artifacts or references.
        store_uri: store that contains the artifacts.
        rolled_back: whether the store serves an older artifact than an outcome's, which is for the
            named class; called before an alias moves.
    """

    def __init__(
        self,
        projection: Projection,
        outcomes: Sequence[Outcome],
        *,
        mode: ArtifactMode,
        store_uri: str,
        rolled_back: Callable[[Outcome, str], bool],
    ) -> None:
        import mlflow

        self._rolled_back = rolled_back
        self._projection, self._client, self._mode = projection, projection.client, mode
        self._store = store_uri if urlparse(store_uri).scheme else str(Path(store_uri).absolute())
        self._outcomes = outcomes
        mlflow.set_tracking_uri(self._client.tracking_uri)

    def register(self, registration: Registration) -> bool:
        """Register the artifact that serves an outcome's class, and set the class's alias to it.

        The alias never moves to an older version of the same store, in any order of logging, nor to
        one that was rolled back. If several campaigns register an artifact at the same time, the
        first version stays.

        Returns:
            Whether anything was changed.

        Raises:
            InfrastructureError: MLflow cannot be reached or rejects a request, or a disk is full.
            IntegrityError: a file of the artifact does not match its manifest.
        """
        with reaching(self._client.tracking_uri):
            return self._registered(registration)

    def _registered(self, registration: Registration) -> bool:
        outcome = registration.outcome
        name = outcome.registered_as
        aliases = self._aliases(name)
        number = aliases.get(outcome.device_class)
        current = None if number is None else self._client.get_model_version(name, number)
        if current is not None and _is_current(current, outcome):
            return False
        version = self._find(name, outcome)
        if version is not None:
            return self._point(version, current, registration)
        model_id = self._find_upload(outcome) or self._upload(registration)
        self._create_model(name)
        self._client.finalize_logged_model(model_id, "READY")
        version = self._create_version(registration, model_id)
        if version.source == f"{MODELS}{model_id}":
            self._link(model_id, version, registration.run_id)
        self._point(version, current, registration)
        return True

    def _aliases(self, name: str) -> dict[str, str]:
        """Return the versions by alias; none if the model does not exist."""
        from mlflow.exceptions import MlflowException

        try:
            aliases = self._client.get_registered_model(name).aliases
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return {}
        return {alias: str(number) for alias, number in aliases.items()}

    def _find(self, name: str, outcome: Outcome) -> ModelVersion | None:
        """Return the first version of an outcome's artifact."""
        found = self._client.search_model_versions(
            f"{named(name)} AND tags.`{ARTIFACT}` = '{outcome.artifact}'"
        )
        alike = [version for version in found if version.name == name]
        return min(alike, key=lambda version: int(version.version), default=None)

    def _point(
        self, version: ModelVersion, current: ModelVersion | None, registration: Registration
    ) -> bool:
        """Set the alias, which is at `current`, unless it must not move; return whether anything
        was changed.
        """
        outcome = registration.outcome
        name, number, target = version.name, outcome.version or 0, str(version.version)
        changed = number > int(version.tags.get(VERSION, 0))
        if changed:  # the store carries unchanged artifacts over to newer versions
            self._client.set_model_version_tag(name, target, VERSION, str(number))
        if current is not None:
            tags = current.tags
            is_newer = int(tags.get(VERSION, 0)) > number and tags.get(STORE) == self._store
            if is_newer or str(current.version) == target:
                return changed
        if self._rolled_back(outcome, registration.serving):
            return changed
        self._client.set_registered_model_alias(name, outcome.device_class, target)
        self._client.update_registered_model(name, model_description(self._outcomes))
        return True

    def _find_upload(self, outcome: Outcome) -> str | None:
        """Return the id of a finished upload that lacks a version; delete broken uploads of this
        campaign.
        """
        complete: str | None = None
        if self._projection.is_resumed:
            wanted = f"tags.`{ARTIFACT}` = '{outcome.artifact}'"
            for model in self._client.search_logged_models(
                [self._projection.experiment_id], wanted
            ):
                if str(model.status) == "READY":
                    complete = str(model.model_id)
                elif model.tags.get(CAMPAIGN) == self._projection.campaign:
                    self._client.delete_logged_model(model.model_id)
        return complete

    def _upload(self, registration: Registration) -> str:
        from freezer.pyfunc import StorePointer  # here: it imports torch

        outcome, serving, run_id = registration.outcome, registration.serving, registration.run_id
        with tempfile.TemporaryDirectory(prefix="coldpress-") as scratch:
            folder = Path(scratch)
            (folder / DATA).mkdir()
            artifact = registration.lay_out(folder / DATA)
            if self._mode == "copy":
                artifact.verify()
            else:
                assert outcome.version is not None, "only published artifacts are registered"
                pointer = StorePointer(
                    store=self._store,
                    model=outcome.model,
                    version=outcome.version,
                    device_class=serving,
                )
                folder = write_reference(folder, pointer)
            manifest = artifact.manifest
            if manifest.version is None:
                manifest = replace(manifest, version=outcome.version)
            model = self._client.create_logged_model(
                self._projection.experiment_id,
                name=f"{outcome.model}-{serving}".replace(".", "-"),  # MLflow rejects dots here
                source_run_id=run_id,
                tags={**self._tags(outcome, serving), CAMPAIGN: self._projection.campaign},
                params={
                    "recipe": manifest.recipe.name,
                    "device_class": serving,
                    "num_threads": str(outcome.num_threads),
                },
                model_type="coldpress",
            )
            write_model_files(folder, manifest, str(model.model_id), run_id)
            upload(self._client, model.artifact_location, folder)
        return str(model.model_id)

    def _create_model(self, name: str) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(name, tags={KIND: FROZEN})
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _create_version(self, registration: Registration, model_id: str) -> ModelVersion:
        """Create a version; if another campaign has created one of the same artifact, delete the
        new one and return the other.
        """
        outcome, serving = registration.outcome, registration.serving
        name = outcome.registered_as
        created = self._client.create_model_version(
            name,
            source=f"{MODELS}{model_id}",  # MLflow leaves the version's `model_id` empty
            run_id=registration.run_id,
            tags={**self._tags(outcome, serving), **_figures(outcome)},
            description=version_description(outcome, serving, self._store),
            model_id=model_id,
        )
        first = self._find(name, outcome)
        if first is None or str(first.version) == str(created.version):
            return created
        self._client.delete_model_version(name, str(created.version))
        if created.source != first.source:
            self._client.delete_logged_model(model_id)
        return first

    def _link(self, model_id: str, version: ModelVersion, run_id: str | None) -> None:
        """Link a logged model to its version, as `mlflow.register_model` does, and to the run that
        made it.
        """
        from mlflow.entities import LoggedModelOutput

        versions = [{"name": version.name, "version": version.version}]
        self._client.set_logged_model_tags(model_id, {MODEL_VERSIONS: json.dumps(versions)})
        if run_id is not None:
            self._client.log_outputs(run_id, [LoggedModelOutput(model_id, 0)])

    def _tags(self, outcome: Outcome, serving: str) -> dict[str, str]:
        return {
            **free_tags(outcome),
            ARTIFACT: str(outcome.artifact),
            VERSION: str(outcome.version),
            "coldpress.device_class": serving,
            STORE: self._store,
        }


def _figures(outcome: Outcome) -> dict[str, str]:
    """Return tags of a version that MLflow's list of versions shows."""
    tags = {"coldpress.verdict": outcome.verdict, "coldpress.recipe": outcome.recipe or "none"}
    if outcome.figures.speedup is not None:
        tags["coldpress.speedup"] = f"{MARKS[outcome.clock]}{outcome.figures.speedup:.2f}"
    return tags


def _is_current(version: ModelVersion, outcome: Outcome) -> bool:
    newest = int(version.tags.get(VERSION, 0))
    return version.tags.get(ARTIFACT) == outcome.artifact and newest >= (outcome.version or 0)
