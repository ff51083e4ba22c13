"""Model registry: published artifacts as versions of a registered model, with one alias for each device class.

    create_logged_model -> log_model_artifacts -> finalize READY -> create_model_version -> set the alias

Deployments see only the last step. Every step can be repeated after a crash: an artifact gets one version, and a broken upload is
deleted. A registered version holds:

    MLmodel            python_function, loader_module freezer.pyfunc, data: artifact, and the signature
    requirements.txt   python_env.yaml
    freezing.md        what freezing did, for people
    artifact/          the whole artifact folder; by reference only manifest.json and store.json
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlparse

from freezer.artifact.describe import FREEZING, manifest_markdown
from freezer.artifact.folder import MANIFEST, Artifact
from freezer.artifact.manifest import Manifest
from freezer.errors import InfrastructureError
from pipeline.records.outcome import Outcome
from pipeline.tracking.connection import listed, reaching
from pipeline.tracking.run_records import free_tags
from pipeline.workspace.staging import temporary_folder, temporary_place

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel
    from mlflow.models import ModelSignature

ArtifactMode = Literal["copy", "reference"]
"""Whether MLflow stores whole artifacts, or references to the store."""

ARTIFACT = "coldpress.artifact"
"""Tag with the artifact's digest. A version that has it is frozen, and never a source."""

VERSION = "coldpress.version"
"""Tag with the newest version of the store that contains the artifact."""

STORE = "coldpress.store"

CAMPAIGN = "coldpress.campaign"
"""Tag of a logged model with the campaign that uploads it."""

LOGGED_MODEL = "models:/"
"""Prefix of a version's source, followed by the id of the logged model; MLflow leaves the version's `model_id` empty."""

DATA = "artifact"
LOADER = "freezer.pyfunc"

LOAD_SETTINGS = {"threads": None, "limit_isa": False}
"""Options of `mlflow.pyfunc.load_model(..., model_config={...})`, passed on to freezer.load."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Registry:
    """Registered models, as one campaign writes them.

    Attributes:
        client, experiment_id: as of `Projection`.
        campaign: name.
        mode: whether to upload artifacts or references.
        store_uri: store that contains the artifacts.
    """

    client: MlflowClient
    experiment_id: str
    campaign: str
    mode: ArtifactMode
    store_uri: str

    def register(self, outcome: Outcome, serving: str, lay_out: Callable[[Path], Artifact], *, run_id: str | None) -> bool:
        """Register the artifact that serves an outcome's class, and set the class's alias to it.

        The alias never moves to an older version of the same store, in whatever order campaigns are logged. If several campaigns
        register an artifact at the same time, the first version stays. Sets the tracking URI of the process: MLflow's registry
        looks logged models up there.

        Args:
            outcome: outcome with an artifact and a version.
            serving: device class of the artifact: the outcome's, or `portable` if eager is kept.
            lay_out: creates the artifact in an empty folder; called only if the artifact is not registered.
            run_id: run that made the artifact.

        Returns:
            Whether anything was changed.

        Raises:
            InfrastructureError: MLflow cannot be reached or rejects a request, or the temporary folder is full.
            IntegrityError: a file of the artifact does not match its manifest.
        """
        with reaching(self.client.tracking_uri):
            registered = self._registered(outcome.registered_as)
            if registered is not None:
                if self._is_current(registered, outcome):
                    return False
                version = self._find_version(outcome)
                if version is not None:
                    return self._point(version, outcome)
            model_id = self._find_upload(str(outcome.artifact)) or self._upload(outcome, serving, lay_out, run_id)
            self._point(self._create_version(outcome, serving, model_id, run_id), outcome)
        return True

    def _registered(self, name: str) -> RegisteredModel | None:
        from mlflow.exceptions import MlflowException

        try:
            return self.client.get_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None

    def _is_current(self, registered: RegisteredModel, outcome: Outcome) -> bool:
        """Whether the alias points to the outcome's artifact; cheaper than a search."""
        number = registered.aliases.get(outcome.device_class)
        if number is None:
            return False
        tags = self.client.get_model_version(registered.name, str(number)).tags
        return tags.get(ARTIFACT) == outcome.artifact and int(tags.get(VERSION, 0)) >= (outcome.version or 0)

    def _find_version(self, outcome: Outcome) -> ModelVersion | None:
        wanted = f"name IN {listed([outcome.registered_as])} AND tags.`{ARTIFACT}` = '{outcome.artifact}'"
        return min(self.client.search_model_versions(wanted), key=lambda version: int(version.version), default=None)

    def _point(self, version: ModelVersion, outcome: Outcome) -> bool:
        """Set the alias, unless it points to a later version of the same store; return whether anything was changed."""
        number = outcome.version or 0
        changed = number > int(version.tags.get(VERSION, 0))
        if changed:  # the store carries unchanged artifacts over to newer versions
            self.client.set_model_version_tag(version.name, version.version, VERSION, str(number))
        current = self.client.get_registered_model(version.name).aliases.get(outcome.device_class)
        if current is not None:
            if str(current) == str(version.version):
                return changed
            tags = self.client.get_model_version(version.name, str(current)).tags
            if tags.get(STORE) == version.tags.get(STORE) and int(tags.get(VERSION, 0)) > number:
                return changed
        self.client.set_registered_model_alias(version.name, outcome.device_class, str(version.version))
        return True

    def _find_upload(self, digest: str) -> str | None:
        """Return the id of a finished upload that lacks a version; delete broken uploads of this campaign."""
        complete: str | None = None
        for model in self.client.search_logged_models([self.experiment_id], f"tags.`{ARTIFACT}` = '{digest}'"):
            if str(model.status) == "READY":
                complete = str(model.model_id)
            elif model.tags.get(CAMPAIGN) == self.campaign:
                self.client.delete_logged_model(model.model_id)
        return complete

    def _upload(self, outcome: Outcome, serving: str, lay_out: Callable[[Path], Artifact], run_id: str | None) -> str:
        with ExitStack() as stack:
            try:
                folder = stack.enter_context(temporary_folder())
                (folder / DATA).mkdir()
                artifact = lay_out(folder / DATA)
            except OSError as error:  # errors of MLflow and of the store's disk are ColdpressErrors already
                raise InfrastructureError(
                    f"no artifact can be laid out in the temporary folder {temporary_place()} ({error}); make room there, or set "
                    "TMPDIR to another folder",
                    code="CP-TEMPORARY",
                ) from error
            if self.mode == "copy":
                artifact.verify()
            else:
                folder = self._reference(outcome, serving, folder)
            manifest = artifact.manifest
            if manifest.version is None:
                manifest = replace(manifest, version=outcome.version)
            model = self.client.create_logged_model(
                self.experiment_id,
                name=f"{outcome.model}-{serving}".replace(".", "-"),  # MLflow rejects dots here
                source_run_id=run_id,
                tags={**self._tags(outcome, serving), CAMPAIGN: self.campaign},
                params={
                    "recipe": manifest.recipe.name,
                    "device_class": serving,
                    "num_threads": str(outcome.num_threads),
                },
                model_type="coldpress",
            )
            _write_model_files(folder, manifest, str(model.model_id), run_id)
            self.client.log_model_artifacts(model.model_id, str(folder))
        self.client.finalize_logged_model(model.model_id, "READY")
        return str(model.model_id)

    def _reference(self, outcome: Outcome, serving: str, folder: Path) -> Path:
        """Write a reference to an artifact in the store; return the folder to upload."""
        from freezer.pyfunc import STORE_POINTER  # here: it imports torch

        data = folder / "reference" / DATA
        data.mkdir(parents=True)
        place = {"store": self._store, "model": outcome.model, "version": outcome.version, "device_class": serving}
        (data / STORE_POINTER).write_text(json.dumps(place))
        return data.parent

    def _create_version(self, outcome: Outcome, serving: str, model_id: str, run_id: str | None) -> ModelVersion:
        """Create a version; if another campaign has created one of the same artifact, delete the new one and return the other."""
        import mlflow
        from mlflow.exceptions import MlflowException

        name = outcome.registered_as
        try:
            self.client.create_registered_model(name, tags={"coldpress.kind": "frozen"})
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        mlflow.set_tracking_uri(self.client.tracking_uri)
        created = self.client.create_model_version(
            name, source=f"{LOGGED_MODEL}{model_id}", run_id=run_id, tags=self._tags(outcome, serving), model_id=model_id
        )
        first = self._find_version(outcome)
        if first is None or str(first.version) == str(created.version):
            return created
        self.client.delete_model_version(name, str(created.version))
        if created.source != first.source:
            self.client.delete_logged_model(model_id)
        return first

    def _tags(self, outcome: Outcome, serving: str) -> dict[str, str]:
        return {
            **free_tags(outcome),
            ARTIFACT: str(outcome.artifact),
            VERSION: str(outcome.version),
            "coldpress.device_class": serving,
            STORE: self._store,
        }

    @property
    def _store(self) -> str:
        return self.store_uri if urlparse(self.store_uri).scheme else str(Path(self.store_uri).absolute())


def _write_model_files(folder: Path, manifest: Manifest, model_id: str, run_id: str | None) -> None:
    """Write everything but the artifact's own files."""
    from mlflow.models import Model

    (folder / DATA / MANIFEST).write_bytes(manifest.to_bytes())
    page = manifest_markdown(manifest)
    if page is not None:
        (folder / FREEZING).write_text(page)
    # `mlflow models serve` runs mlflow in the environment of this file.
    requirements = ("coldpress", f"torch>={manifest.needs.torch}", "safetensors", "mlflow")
    (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in requirements))
    (folder / "python_env.yaml").write_text(
        f'python: "{platform.python_version()}"\nbuild_dependencies:\n- pip\ndependencies:\n- -r requirements.txt\n'
    )
    size_bytes = sum(item.size_bytes for item in manifest.contents)
    model = Model(run_id=run_id, model_id=model_id, signature=_signature(manifest), model_size_bytes=size_bytes)
    # The same as mlflow.pyfunc.add_to_model; importing that module takes a second.
    model.add_flavor(
        "python_function",
        loader_module=LOADER,
        data=DATA,
        python_version=platform.python_version(),
        env={"virtualenv": "python_env.yaml"},
        config=dict(LOAD_SETTINGS),
    )
    model.save(str(folder / "MLmodel"))


def _signature(manifest: Manifest) -> ModelSignature | None:
    """Return the signature: tensors by path, -1 for named dims; None if numpy lacks a dtype (bfloat16)."""
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    inputs = [(i.dtype, tuple(-1 if isinstance(size, str) else size for size in i.shape), i.name) for i in manifest.inputs.tensors]
    outputs = [(o.dtype, (-1,) * o.rank, o.name) for o in manifest.outputs]
    if not inputs or any(dtype == "bfloat16" for dtype, _, _ in (*inputs, *outputs)):
        return None
    given, returned = (
        Schema([TensorSpec(np.dtype(dtype), shape, name) for dtype, shape, name in specs]) for specs in (inputs, outputs)
    )
    return ModelSignature(inputs=given, outputs=returned)
