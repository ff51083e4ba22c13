"""The model registry: published artifacts as versions of a registered model, one alias for each device class.

    create_logged_model -> log_model_artifacts -> finalize READY -> create_model_version -> set the alias

Setting the alias is the only step that a deployment sees, and the last; an alias never goes back to an older version of the store,
in whatever order campaigns are logged. A registered version looks so:

    MLmodel            python_function, loader_module freezer.pyfunc, data: artifact, and the signature
    requirements.txt   python_env.yaml
    freezing.md        what freezing did, for people
    artifact/          the artifact folder in full; by reference, manifest.json and store.json alone

Every step may be repeated after a crash: an artifact that has a version gets no other, and an upload that broke off is thrown away.
"""

from __future__ import annotations

import json
import platform
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlparse

from freezer.artifact.folder import MANIFEST, Artifact
from freezer.artifact.manifest import Manifest
from freezer.artifact.markdown import FREEZING, manifest_markdown
from pipeline.records.outcome import Outcome
from pipeline.tracking.connection import listed, reaching
from pipeline.tracking.run_records import free_tags

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.models import ModelSignature

ARTIFACT = "coldpress.artifact"
"""The tag with the artifact's digest. A version that has it is frozen, and never a source (CONTRACT.md)."""

VERSION = "coldpress.version"
"""The tag with the number of the newest version of the store that holds the artifact."""

STORE = "coldpress.store"

CAMPAIGN = "coldpress.campaign"
"""The tag of a logged model with the campaign that uploads it."""

_LOGGED_MODEL = "models:/"
"""The source of a version is this and the logged model's id; MLflow leaves its `model_id` empty."""

ABANDONED_S = 86_400.0
"""After which an upload that another campaign began is taken for one that broke off."""

DATA = "artifact"
LOADER = "freezer.pyfunc"

LOAD_SETTINGS = {"threads": None, "limit_isa": False}
"""What `mlflow.pyfunc.load_model(..., model_config={...})` may set; freezer.pyfunc gives them to freezer.load."""


def register(
    client: MlflowClient,
    experiment_id: str,
    outcome: Outcome,
    artifact: Artifact,
    *,
    run_id: str | None,
    mode: Literal["copy", "reference"],
    store_uri: str,
    campaign: str,
) -> str:
    """The registered version of the artifact that serves an outcome's class, with the class's alias set to it.

    Several campaigns may register the same artifact at a time: the first version of it stays.

    Makes the client's tracking URI the process's own: MLflow's registry looks a logged model up there and nowhere else.

    Args:
        client: from `Projection`.
        experiment_id: that holds the logged model.
        outcome: with the artifact's digest and version.
        artifact: the folder; its files may be links. Where eager is kept, it is the portable one.
        run_id: of the run that made it.
        mode: `copy` uploads the artifact, `reference` only says where it is.
        store_uri: of the store that holds it.
        campaign: that registers it.

    Raises:
        InfrastructureError: MLflow cannot be reached or refuses.
        IntegrityError: a file of the artifact is not what its manifest says.
    """
    name, digest = outcome.registered_as, outcome.artifact
    if digest is None or outcome.version is None:
        raise ValueError(f"{outcome.model} for {outcome.device_class} has no published artifact to register")
    tags = {
        **free_tags(outcome),
        ARTIFACT: digest,
        VERSION: str(outcome.version),
        "coldpress.device_class": artifact.manifest.device_class,
        STORE: _absolute(store_uri),
    }
    with reaching(client.tracking_uri):
        version = _find_version(client, name, digest)
        if version is None:
            model_id = _find_upload(client, experiment_id, digest, campaign)
            if model_id is None:
                uploaded = {**tags, CAMPAIGN: campaign}
                model_id = _upload(client, experiment_id, outcome, artifact, run_id=run_id, mode=mode, tags=uploaded)
            version = _only_version(client, _create_version(client, name, model_id, run_id, tags), digest)
        _point(client, version, outcome)
    return str(version.version)


def alias(client: MlflowClient, outcome: Outcome) -> bool | None:
    """Set the alias of an outcome's class to the version that holds its artifact, when that is registered already.

    Returns:
        Whether anything had to be changed; None when no version holds the artifact, which has to be registered then.

    Raises:
        InfrastructureError: MLflow cannot be reached or refuses.
    """
    with reaching(client.tracking_uri):
        version = _find_version(client, outcome.registered_as, str(outcome.artifact))
        return None if version is None else _point(client, version, outcome)


def _find_version(client: MlflowClient, name: str, digest: str) -> ModelVersion | None:
    found = client.search_model_versions(f"name IN {listed([name])} AND tags.`{ARTIFACT}` = '{digest}'")
    return min(found, key=lambda version: int(version.version), default=None)


def _point(client: MlflowClient, version: ModelVersion, outcome: Outcome) -> bool:
    """Set the alias, unless it points to what the same store published later; whether anything was changed."""
    number = outcome.version or 0
    changed = number > int(version.tags.get(VERSION, 0))
    if changed:  # the newest version of the store that holds the artifact: unchanged ones are carried over
        client.set_model_version_tag(version.name, version.version, VERSION, str(number))
    current = client.get_registered_model(version.name).aliases.get(outcome.device_class)
    if current is not None:
        if str(current) == str(version.version):
            return changed
        tags = client.get_model_version(version.name, str(current)).tags
        if tags.get(STORE) == version.tags.get(STORE) and int(tags.get(VERSION, 0)) > number:
            return changed
    client.set_registered_model_alias(version.name, outcome.device_class, str(version.version))
    return True


def _only_version(client: MlflowClient, created: ModelVersion, digest: str) -> ModelVersion:
    """The version of an artifact: the one created now, unless another campaign has created one meanwhile, which stays then."""
    first = _find_version(client, created.name, digest)
    if first is None or str(first.version) == str(created.version):
        return created
    client.delete_model_version(created.name, str(created.version))
    if created.source != first.source:
        client.delete_logged_model(created.source.removeprefix(_LOGGED_MODEL))
    return first


def _find_upload(client: MlflowClient, experiment_id: str, digest: str, campaign: str) -> str | None:
    """The logged model of an earlier try that only lacks its version; uploads that broke off are deleted."""
    complete: str | None = None
    abandoned_ms = (time.time() - ABANDONED_S) * 1000
    for model in client.search_logged_models([experiment_id], f"tags.`{ARTIFACT}` = '{digest}'"):
        if str(model.status) == "READY":
            complete = str(model.model_id)
        elif model.tags.get(CAMPAIGN) == campaign or model.creation_timestamp < abandoned_ms:
            client.delete_logged_model(model.model_id)
    return complete


def _upload(
    client: MlflowClient,
    experiment_id: str,
    outcome: Outcome,
    artifact: Artifact,
    *,
    run_id: str | None,
    mode: Literal["copy", "reference"],
    tags: dict[str, str],
) -> str:
    model = client.create_logged_model(
        experiment_id,
        name=f"{outcome.model}-{artifact.manifest.device_class}".replace(".", "-"),  # a logged model's name holds no dot
        source_run_id=run_id,
        tags=tags,
        params={
            "recipe": str(artifact.manifest.recipe.get("name", "none")),
            "device_class": artifact.manifest.device_class,
            "num_threads": str(outcome.num_threads),
        },
        model_type="coldpress",
    )
    manifest = artifact.manifest
    if manifest.version is None:
        manifest = replace(manifest, version=outcome.version)
    with tempfile.TemporaryDirectory(prefix="coldpress-") as scratch:
        staging = Path(scratch)
        (staging / DATA).mkdir()
        (staging / DATA / MANIFEST).write_bytes(manifest.to_bytes())
        if mode == "copy":
            _link_files(artifact, staging / DATA)
        else:
            from freezer.pyfunc import STORE_POINTER  # here: it imports torch

            pointer = {"store": tags[STORE], "model": outcome.model, "version": outcome.version}
            (staging / DATA / STORE_POINTER).write_text(json.dumps({**pointer, "device_class": manifest.device_class}))
        page = manifest_markdown(manifest)
        if page is not None:
            (staging / FREEZING).write_text(page)
        _write_model_files(staging, manifest, model.model_id, run_id)
        client.log_model_artifacts(model.model_id, str(staging))
    client.finalize_logged_model(model.model_id, "READY")
    return str(model.model_id)


def _link_files(artifact: Artifact, folder: Path) -> None:
    """Links to the artifact's files, verified: uploads follow them, and nothing is copied twice."""
    artifact.verify()
    for name in [*(p.path for p in artifact.manifest.payloads), *(f.path for f in artifact.manifest.files)]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to((artifact.folder / name).resolve())


def _write_model_files(folder: Path, manifest: Manifest, model_id: str, run_id: str | None) -> None:
    from mlflow.models import Model

    # mlflow itself is what `mlflow models serve` runs in the environment that it makes from this file.
    requirements = ("coldpress", f"torch>={manifest.needs['torch']}", "safetensors", "mlflow")
    (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in requirements))
    (folder / "python_env.yaml").write_text(
        f'python: "{platform.python_version()}"\nbuild_dependencies:\n- pip\ndependencies:\n- -r requirements.txt\n'
    )
    size_bytes = sum(p.size_bytes for p in manifest.payloads) + sum(f.size_bytes for f in manifest.files)
    model = Model(run_id=run_id, model_id=model_id, signature=_signature(manifest), model_size_bytes=size_bytes)
    # What mlflow.pyfunc.add_to_model does; importing that module takes a second and warns of mlflow's own type hints.
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
    """Tensors by path, with -1 for named dims; None where numpy has no such dtype (bfloat16), and freezer checks alone."""
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    inputs = [(i.dtype, tuple(-1 if isinstance(size, str) else size for size in i.shape), i.name) for i in manifest.inputs.tensors]
    outputs = [(o.dtype, (-1,) * o.rank, o.name) for o in manifest.outputs]
    if not inputs or any(dtype == "bfloat16" for dtype, _, _ in (*inputs, *outputs)):
        return None
    given, given_back = (
        Schema([TensorSpec(np.dtype(dtype), shape, name) for dtype, shape, name in specs]) for specs in (inputs, outputs)
    )
    return ModelSignature(inputs=given, outputs=given_back)


def _create_version(client: MlflowClient, name: str, model_id: str, run_id: str | None, tags: dict[str, str]) -> ModelVersion:
    import mlflow
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name, tags={"coldpress.kind": "frozen"})
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    mlflow.set_tracking_uri(client.tracking_uri)
    return client.create_model_version(name, source=f"{_LOGGED_MODEL}{model_id}", run_id=run_id, tags=tags, model_id=model_id)


def _absolute(store_uri: str) -> str:
    return store_uri if urlparse(store_uri).scheme else str(Path(store_uri).absolute())
