"""Models of MLflow's registry as sources: which version a URI means, and its files.

A version that is a frozen artifact of ours is never a source. mlmodel.py reads what was downloaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from freezer.errors import CatalogError, SourceError
from pipeline.tracking.connection import (
    MISSING,
    MODELS,
    all_pages,
    connect,
    named,
    reaching,
    resolve,
)
from pipeline.tracking.mlmodel import MLMODEL
from pipeline.tracking.run_records import ARTIFACT, FROZEN, KIND

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel
    from mlflow.store.entities import PagedList

MODELS_PAGE = 1000
"""MLflow's limit of registered models in one response."""

VERSIONS_PAGE = 10_000

_NUM_NAMED = 20
"""Models or versions listed in an error message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistryModel:
    """One version of a registered model.

    Attributes:
        name: name in the registry, any text without `/` and `:`.
        version: number, as text.
        run_id: run that made it, or None.
        tags: tags of the version.
        model_uri: `models:/NAME/VERSION`.
    """

    name: str
    version: str
    run_id: str | None
    tags: Mapping[str, str]
    model_uri: str

    @classmethod
    def of(cls, version: ModelVersion) -> RegistryModel:
        """Convert MLflow's record of a version."""
        return cls(
            name=str(version.name),
            version=str(version.version),
            run_id=version.run_id or None,
            tags=dict(version.tags),
            model_uri=f"{MODELS}{version.name}/{version.version}",
        )


def resolve_model(tracking_uri: str, uri: str) -> RegistryModel:
    """Return the version that a URI means.

    Args:
        tracking_uri: URI of MLflow.
        uri: `models:/NAME@ALIAS`, `models:/NAME/VERSION`, or `models:/NAME` and
            `models:/NAME/latest` for the newest version that is not a frozen artifact.

    Raises:
        SourceError: the model, alias or version does not exist, is not ready, or is a frozen
            artifact.
        InfrastructureError: MLflow cannot be reached.
    """
    name, alias, number = _parse(uri)
    address = resolve(tracking_uri)
    client = connect(address)
    with reaching(address):
        registered = _registered_model(client, name)
        if alias is not None:
            number = registered.aliases.get(alias)
            if number is None:
                known = sorted(registered.aliases.items())
                aliases = ", ".join(f"{alias} (version {of})" for alias, of in known) or "none"
                raise _registry_error(f"model {name!r} has no alias {alias!r}; it has {aliases}")
        if number is None:
            return _newest(client, registered)
        return _numbered(client, name, str(number))


def list_registry(
    tracking_uri: str, filter_string: str | None, alias: str | None
) -> Iterator[RegistryModel]:
    """Yield one version of each registered model that matches, ordered by name.

    Models without such a version are omitted: models that Coldpress registered, models with only
    frozen versions, models without the alias, prompts.

    Args:
        tracking_uri: URI of MLflow.
        filter_string: as of `MlflowClient.search_registered_models`; None matches all.
        alias: alias like `champion`; None means the newest version that is not a frozen artifact.

    Raises:
        CatalogError: MLflow rejects the filter.
        InfrastructureError: MLflow cannot be reached.
    """
    address = resolve(tracking_uri)
    client = connect(address)
    token: str | None = None
    while True:
        with reaching(address):
            page = _search_models(client, filter_string, token)
            listed = [_listed(client, registered, alias) for registered in page]
        yield from filter(None, listed)
        token = page.token
        if not token:
            return


def download(tracking_uri: str, model: RegistryModel, dest: Path) -> Path:
    """Download all files of a version into an empty folder; return the folder that has them.
    Nothing is executed.

    Raises:
        SourceError: the version's files are gone.
        InfrastructureError: MLflow or its artifact storage cannot be reached.
    """
    from mlflow.artifacts import download_artifacts, list_artifacts

    address = resolve(tracking_uri)
    client = connect(address)
    with reaching(address):
        location = _location(client, model)
        try:
            folder = download_artifacts(
                artifact_uri=location,
                dst_path=str(dest),
                tracking_uri=client.tracking_uri,
                registry_uri=client.tracking_uri,
            )
        # every storage has its own errors; a listing separates missing files from a missing storage
        except Exception as error:
            files = list_artifacts(artifact_uri=location, tracking_uri=client.tracking_uri)
            if MLMODEL in {file.path for file in files}:
                raise
            raise _registry_error(
                f"the files of {model.model_uri} are gone from {location}; log the model again"
            ) from error
        if not (Path(folder) / MLMODEL).is_file():
            raise _registry_error(
                f"{model.model_uri} has no {MLMODEL} file in {location}; log the model again"
            )
        return Path(folder)


def _location(client: MlflowClient, model: RegistryModel) -> str:
    """Return the URI of a version's files."""
    uri = str(client.get_model_version_download_uri(model.name, model.version))
    if uri.startswith(MODELS):  # a logged model, which only the tracking server can resolve
        return str(client.get_logged_model(uri.removeprefix(MODELS)).artifact_location)
    return uri


def _parse(uri: str) -> tuple[str, str | None, str | None]:
    """Return name, alias and version of a URI; no version means the newest."""
    rest = uri.removeprefix(MODELS)
    name, slash, number = rest.partition("/")
    alias: str | None = None
    if not slash and "@" in rest:
        name, _, alias = rest.rpartition("@")
    if (
        not uri.startswith(MODELS)
        or not name
        or alias == ""
        or (slash and not number)
        or "/" in number
    ):
        raise _registry_error(
            f"{uri!r} is not a registered model; expected models:/NAME@ALIAS, models:/NAME/VERSION"
            " or models:/NAME"
        )
    return name, alias, number if number not in ("", "latest") else None


def _registered_model(client: MlflowClient, name: str) -> RegisteredModel:
    """Return MLflow's record of a model, with its aliases; the error lists existing models."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code not in MISSING:
            raise
    listed = client.search_registered_models(max_results=MODELS_PAGE, order_by=["name ASC"])
    raise _registry_error(
        f"MLflow has no registered model {name!r}; it has {_some(model.name for model in listed)}"
    )


def _numbered(client: MlflowClient, name: str, number: str) -> RegistryModel:
    """Return one version of an existing model."""
    from mlflow.exceptions import MlflowException

    try:
        version = client.get_model_version(name, number)
    except MlflowException as error:
        if error.error_code not in MISSING:
            raise
        existing = _some(str(version.version) for version in _versions(client, name))
        raise _registry_error(
            f"model {name!r} has no version {number!r}; it has {existing}"
        ) from None
    uri = f"{MODELS}{name}/{number}"
    if ARTIFACT in version.tags:
        raise _registry_error(
            f"{uri} is a frozen artifact (tag {ARTIFACT}), which cannot be a source; name the model"
            f" it was made from, or {MODELS}{name} for the newest version that is not frozen"
        )
    if not _usable(version):
        raise _registry_error(
            f"{uri} is {version.status} ({version.status_message or 'no reason given'}); log it"
            " again"
        )
    return RegistryModel.of(version)


def _newest(client: MlflowClient, registered: RegisteredModel) -> RegistryModel:
    """Return the newest version of a model that is not a frozen artifact."""
    model = _newest_usable(client, registered)
    if model is not None:
        return model
    name = registered.name
    if registered.latest_versions:
        raise _registry_error(
            f"all versions of model {name!r} are frozen artifacts (tag {ARTIFACT}) or not ready;"
            " name the model they were made from"
        )
    raise _registry_error(
        f"model {name!r} has no version that is ready; log one with mlflow.pytorch.log_model"
    )


def _search_models(client: MlflowClient, filter_string: str | None, token: str | None) -> PagedList:
    from mlflow.exceptions import MlflowException

    try:
        return client.search_registered_models(
            filter_string, max_results=MODELS_PAGE, order_by=["name ASC"], page_token=token
        )
    except MlflowException as error:
        if error.error_code != "INVALID_PARAMETER_VALUE":
            raise
        raise CatalogError(
            f"MLflow rejects the filter {filter_string!r}: {error.message}; expected a filter of"
            " registered models, like \"name LIKE 'credit-%' AND tags.team = 'risk'\"",
            code="CP-REGISTRY",
        ) from None


def _listed(
    client: MlflowClient, registered: RegisteredModel, alias: str | None
) -> RegistryModel | None:
    """Return the version of a model to list; None if it has none."""
    if alias is None:
        frozen = registered.tags.get(KIND) == FROZEN
        return None if frozen else _newest_usable(client, registered)
    if alias not in registered.aliases:
        return None
    number = str(registered.aliases[alias])  # an int from a database, a text from a server
    version = _latest(registered)
    if version is None or str(version.version) != number:
        version = client.get_model_version(registered.name, number)
    return RegistryModel.of(version) if _usable(version) else None


def _newest_usable(client: MlflowClient, registered: RegisteredModel) -> RegistryModel | None:
    """Return the newest version that may be a source; it is searched for only if it is not the
    newest of all, which MLflow returns with the model.
    """
    latest = _latest(registered)
    if latest is None:
        return None
    versions = [latest] if _usable(latest) else _versions(client, registered.name)
    usable = [version for version in versions if _usable(version)]
    return RegistryModel.of(usable[0]) if usable else None


def _latest(registered: RegisteredModel) -> ModelVersion | None:
    versions = registered.latest_versions or ()
    return max(versions, key=lambda version: int(version.version), default=None)


def _versions(client: MlflowClient, name: str) -> list[ModelVersion]:
    """Return all versions of a model, the newest first."""
    return all_pages(
        lambda token: client.search_model_versions(
            named(name),
            max_results=VERSIONS_PAGE,
            order_by=["version_number DESC"],
            page_token=token,
        )
    )


def _usable(version: ModelVersion) -> bool:
    return ARTIFACT not in version.tags and str(version.status) == "READY"


def _some(names: Iterable[str]) -> str:
    known = list(names)
    more = f" and {len(known) - _NUM_NAMED} more" if len(known) > _NUM_NAMED else ""
    return f"{', '.join(known[:_NUM_NAMED])}{more}" if known else "none"


def _registry_error(message: str) -> SourceError:
    return SourceError(message, code="CP-REGISTRY")
