"""Model registry: published artifacts as versions of a registered model, with one alias for each
device class.

    create_logged_model -> log_model_artifacts -> finalize READY -> create_model_version -> set the
    alias

Deployments see only the last step. Every step can be repeated after a crash: an artifact gets one
version, and an upload without a version is deleted. A registered version holds:

    MLmodel         python_function, loader_module freezer.pyfunc, data: artifact, and the signature
    code/freezer.zip   with requirements.txt and python_env.yaml: the environment of `mlflow models
                       serve`
    artifact/          the whole artifact folder; by reference only manifest.json and store.json
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from freezer.artifact import Artifact
from freezer.codec import encode, frozen
from freezer.errors import NotPublishedError
from freezer.files import scratch_folder
from freezer.hardware import DEVICE_CLASSES, PORTABLE
from freezer.spec import CLOCKS, MARKS
from pipeline.records import Outcome
from pipeline.tracking.campaign_summary import version_description
from pipeline.tracking.connection import (
    MODELS,
    all_pages,
    connected,
    named,
    reaching,
    upload,
)
from pipeline.tracking.model_files import DATA, write_model_files
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
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel

    from freezer.store import Version
    from pipeline.tracking.projection import Projection

ArtifactMode = Literal["copy", "reference"]
"""Whether MLflow stores whole artifacts, or references to the store."""

MODEL_VERSIONS = "mlflow.modelVersions"
"""Tag of a logged model with its versions, for MLflow's pages."""


@frozen
class Registration:
    """An artifact to register.

    Attributes:
        outcome: outcome with an artifact and a version.
        serving: device class of the artifact: the outcome's, or `portable` if eager is kept.
        mode: whether to upload the artifact or a reference.
        store_uri: store that contains the artifact.
        lay_out: creates the artifact in an empty folder; called only if the artifact is not
            registered.
        rolled_back: whether the store serves an older artifact; called before an alias moves.
        run_id: run that made the artifact.
    """

    projection: Projection
    outcome: Outcome
    serving: str
    mode: ArtifactMode
    store_uri: str
    lay_out: Callable[[Path], Artifact]
    rolled_back: Callable[[], bool]
    run_id: str | None = None

    def register(self) -> None:
        """Register the artifact that serves an outcome's class, and set the class's alias to it.

        The alias never moves to an older version of the same store, in any order of logging, nor to
        one that was rolled back. If several campaigns register an artifact at the same time, the
        first version stays.

        Sets the tracking URI of the process: MLflow's registry looks logged models up there.

        Raises:
            InfrastructureError: MLflow cannot be reached or rejects a request, or a disk is full.
            IntegrityError: a file of the artifact does not match its manifest.
        """
        import mlflow

        mlflow.set_tracking_uri(self._client.tracking_uri)
        with reaching(self._client.tracking_uri):
            current = self._current()
            if current is None or not _is_current(current, self.outcome):
                self._point(self._find() or self._create(), current)

    @property
    def _client(self) -> MlflowClient:
        return self.projection.client

    @property
    def _name(self) -> str:
        return self.outcome.registered_as

    def _current(self) -> ModelVersion | None:
        """Return the version that the class's alias points to.

        MLflow's answer about the alias of a missing model is 403 where users log in.
        """
        for model in self._client.search_registered_models(named(self._name)):
            number = model.aliases.get(self.outcome.device_class)
            if number is not None:
                return self._client.get_model_version(self._name, number)
        return None

    def _find(self) -> ModelVersion | None:
        """Return the first version of the artifact."""
        found = self._client.search_model_versions(
            f"{named(self._name)} AND tags.`{ARTIFACT}` = '{self.outcome.artifact}'"
        )
        return min(found, key=lambda version: int(version.version), default=None)

    def _create(self) -> ModelVersion:
        """Upload the artifact and create a version of it; if another campaign has created one
        meanwhile, delete the new one and return the other.
        """
        self._delete_uploads()
        model_id = self._upload()
        self._create_model()
        self._client.finalize_logged_model(model_id, "READY")
        created = self._client.create_model_version(
            self._name,
            source=f"{MODELS}{model_id}",  # MLflow leaves the version's `model_id` empty
            run_id=self.run_id,
            tags={**self._tags(), **_figures(self.outcome)},
            description=version_description(self.outcome, self.store_uri),
            model_id=model_id,
        )
        first = self._find()
        if first is None or str(first.version) == str(created.version):
            self._link(model_id, created)
            return created
        self._client.delete_model_version(self._name, str(created.version))
        self._client.delete_logged_model(model_id)
        return first

    def _point(self, version: ModelVersion, current: ModelVersion | None) -> None:
        """Set the alias, which is at `current`, unless it must not move."""
        number, target = self.outcome.version or 0, str(version.version)
        if number > int(version.tags.get(VERSION, 0)):
            # the store carries unchanged artifacts over to newer versions
            self._client.set_model_version_tag(self._name, target, VERSION, str(number))
        if current is not None:
            tags = current.tags
            is_newer = int(tags.get(VERSION, 0)) > number and tags.get(STORE) == self.store_uri
            if is_newer or str(current.version) == target:
                return
        if not self.rolled_back():
            self._client.set_registered_model_alias(self._name, self.outcome.device_class, target)

    def _delete_uploads(self) -> None:
        """Delete uploads that an earlier driver of this campaign left without a version."""
        wanted = f"tags.`{ARTIFACT}` = '{self.outcome.artifact}'"
        for model in self._client.search_logged_models([self.projection.experiment_id], wanted):
            if model.tags.get(CAMPAIGN) == self.projection.campaign:
                self._client.delete_logged_model(model.model_id)

    def _upload(self) -> str:
        with scratch_folder() as scratch:
            folder = scratch
            (folder / DATA).mkdir()
            artifact = self.lay_out(folder / DATA)
            if self.mode == "copy":
                artifact.verify()
            else:
                folder = self._refer(folder)
            manifest = artifact.manifest
            if manifest.version is None:
                manifest = replace(manifest, version=self.outcome.version)
            model = self._client.create_logged_model(
                self.projection.experiment_id,
                # MLflow rejects dots here
                name=f"{self.outcome.model}-{self.serving}".replace(".", "-"),
                source_run_id=self.run_id,
                tags={**self._tags(), CAMPAIGN: self.projection.campaign},
                model_type="coldpress",
            )
            write_model_files(folder, manifest, str(model.model_id), self.run_id)
            upload(self._client, model.artifact_location, folder)
        return str(model.model_id)

    def _refer(self, folder: Path) -> Path:
        """Write a reference to the artifact in the store; return the folder to upload."""
        from freezer.pyfunc import STORE_POINTER, StorePointer  # here: it imports torch

        assert self.outcome.version is not None, "only published artifacts are registered"
        pointer = StorePointer(
            store=self.store_uri,
            model=self.outcome.model,
            version=self.outcome.version,
            device_class=self.serving,
        )
        data = folder / "reference" / DATA
        data.mkdir(parents=True)
        (data / STORE_POINTER).write_text(json.dumps(encode(pointer)))
        return data.parent

    def _create_model(self) -> None:
        from mlflow.exceptions import MlflowException

        about = (
            f"Frozen by Coldpress from {self.outcome.source}. Each alias is a device class, and"
            " points to the artifact that serves it."
        )
        try:
            self._client.create_registered_model(self._name, {KIND: FROZEN}, about)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _link(self, model_id: str, version: ModelVersion) -> None:
        """Link a logged model to its version, as `mlflow.register_model` does, and to the run that
        made it.
        """
        from mlflow.entities import LoggedModelOutput

        versions = [{"name": version.name, "version": version.version}]
        self._client.set_logged_model_tags(model_id, {MODEL_VERSIONS: json.dumps(versions)})
        if self.run_id is not None:
            self._client.log_outputs(self.run_id, [LoggedModelOutput(model_id, 0)])

    def _tags(self) -> dict[str, str]:
        return {
            **free_tags(self.outcome),
            ARTIFACT: str(self.outcome.artifact),
            VERSION: str(self.outcome.version),
            "coldpress.device_class": self.serving,
            STORE: self.store_uri,
        }


def _figures(outcome: Outcome) -> dict[str, str]:
    """Return tags of a version that MLflow's list of versions shows."""
    tags = {"coldpress.verdict": outcome.verdict, "coldpress.recipe": outcome.recipe or "none"}
    if outcome.figures.speedup is not None:
        tags["coldpress.speedup"] = f"{MARKS[outcome.clock]}{outcome.figures.speedup:.2f}"
    elif outcome.clock == "none":
        tags["coldpress.speedup"] = CLOCKS["none"]
    return tags


def _is_current(version: ModelVersion, outcome: Outcome) -> bool:
    newest = int(version.tags.get(VERSION, 0))
    return version.tags.get(ARTIFACT) == outcome.artifact and newest >= (outcome.version or 0)


def move_aliases(tracking_uri: str, name: str, version: Version, *, remove: bool) -> None:
    """Set the aliases of a name: `prod-CLASS` to the artifact of each class of a version, and
    `prod` to that of `portable`, which any machine serves, or else of the first class. All are set,
    or none.

    Args:
        tracking_uri: URI of MLflow.
        name: the name.
        version: the version, as the store has it.
        remove: whether the aliases end.

    Raises:
        InfrastructureError: MLflow cannot be reached, or refuses.
        NotPublishedError: MLflow lacks an artifact.
    """
    with connected(tracking_uri) as client, ExitStack() as undo:
        for registered, numbers in _aliases(client, name, version).items():
            before = client.get_registered_model(registered).aliases
            for alias in (name, *(f"{name}-{each}" for each in DEVICE_CLASSES)):
                now, wanted = before.get(alias), None if remove else numbers.get(alias)
                if now != wanted:
                    undo.callback(_set_alias, client, registered, alias, now)
                    _set_alias(client, registered, alias, wanted)
        undo.pop_all()


def _aliases(client: MlflowClient, name: str, version: Version) -> dict[str, dict[str, str]]:
    """Version numbers in MLflow by alias, by registered model."""
    wanted: dict[str, dict[str, str]] = {}
    for device_class, image in sorted(version.images.items()):
        found = client.search_model_versions(f"tags.`{ARTIFACT}` = '{image.digest}'")
        if not found:
            raise NotPublishedError(
                f"MLflow at {client.tracking_uri} lacks {device_class} of {version.model}:"
                f"{version.number}; log it with `coldpress replay --all`, or --tracking-uri none"
            )
        for each in sorted(found, key=lambda each: -int(each.version)):
            numbers = wanted.setdefault(each.name, {})
            numbers[f"{name}-{device_class}"] = str(each.version)
    for numbers in wanted.values():
        numbers[name] = numbers.get(f"{name}-{PORTABLE}") or next(iter(numbers.values()))
    return wanted


def _set_alias(client: MlflowClient, name: str, alias: str, version: str | None) -> None:
    if version is None:
        client.delete_registered_model_alias(name, alias)
    else:
        client.set_registered_model_alias(name, alias, version)


def aliased_artifacts(tracking_uri: str) -> set[str]:
    """Digests of all artifacts that have an alias.

    Raises:
        InfrastructureError: MLflow cannot be reached.
    """
    digests = set()
    with connected(tracking_uri) as client:
        models: list[RegisteredModel] = all_pages(
            lambda page: client.search_registered_models(page_token=page)
        )
        for model in models:
            for number in set(model.aliases.values()):
                digests.add(client.get_model_version(model.name, number).tags.get(ARTIFACT, ""))
    return digests
