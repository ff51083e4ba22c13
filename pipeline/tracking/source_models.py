"""Models of MLflow's registry as sources: which version a URI means, and its files.

A version that is a frozen artifact of ours is never a source. mlmodel.py reads what was downloaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

from freezer.codec import frozen
from freezer.errors import CatalogError, UsageError
from pipeline.tracking.connection import (
    MISSING,
    MODELS,
    all_pages,
    connected,
    named,
)
from pipeline.tracking.mlmodel import MLMODEL, registry_error
from pipeline.tracking.run_records import ARTIFACT, FROZEN, KIND

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel
    from mlflow.store.entities import PagedList

URI = re.compile(r"models:/([^/]+?)(?:@([^/@]+)|/([^/]+))?")
"""Name, alias and version."""

MODELS_PAGE = 1000
"""MLflow's limit of registered models in one response."""

VERSIONS_PAGE = 10_000


@frozen
class RegistryModel:
    """One version of a registered model.

    Attributes:
        name: name in the registry, any text without `/` and `:`.
        version: number, as text.
        run_id: run that made it, or None.
    """

    name: str
    version: str
    run_id: str | None = None

    @property
    def model_uri(self) -> str:
        """`models:/NAME/VERSION`."""
        return f"{MODELS}{self.name}/{self.version}"

    @classmethod
    def of(cls, version: ModelVersion) -> RegistryModel:
        """Convert MLflow's record of a version."""
        return cls(
            name=str(version.name),
            version=str(version.version),
            run_id=version.run_id or None,
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
    from mlflow.exceptions import MlflowException

    name, alias, number = _parse(uri)
    with connected(tracking_uri) as client:
        try:
            if alias is not None:
                return _checked(client.get_model_version_by_alias(name, alias))
            if number is not None:
                return _checked(client.get_model_version(name, number))
            newest = _newest_usable(client, client.get_registered_model(name))
        except MlflowException as error:
            if error.error_code not in MISSING:
                raise
            raise registry_error(f"{uri} does not exist: {error.message}") from None
    if newest is None:
        raise registry_error(
            f"all versions of model {name!r} are frozen artifacts (tag {ARTIFACT}) or not ready;"
            " log one with mlflow.pytorch.log_model"
        )
    return newest


def list_registry(
    tracking_uri: str, filter_string: str | None, alias: str | None
) -> list[RegistryModel]:
    """Return one version of each registered model that matches, ordered by name.

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
    with connected(tracking_uri) as client:
        found: list[RegisteredModel] = all_pages(
            lambda token: _search_models(client, filter_string, token)
        )
        listed = [_listed(client, registered, alias) for registered in found]
    return [model for model in listed if model is not None]


def download(tracking_uri: str, model: RegistryModel, dest: Path) -> Path:
    """Download all files of a version into an empty folder; return the folder that has them.
    Nothing is executed.

    Raises:
        SourceError: the version's files are gone.
        InfrastructureError: MLflow or its artifact storage cannot be reached.
    """
    from mlflow.artifacts import download_artifacts, list_artifacts

    with connected(tracking_uri) as client:
        location = _location(client, model)
        try:
            folder = download_artifacts(
                artifact_uri=location,
                dst_path=str(dest),
                tracking_uri=client.tracking_uri,
                registry_uri=os.environ.get("MLFLOW_REGISTRY_URI") or client.tracking_uri,
            )
        # every storage has its own errors; a listing separates missing files from a missing storage
        except Exception as error:
            files = list_artifacts(artifact_uri=location, tracking_uri=client.tracking_uri)
            if MLMODEL in {file.path for file in files}:
                raise
            raise registry_error(
                f"the files of {model.model_uri} are gone from {location}; log the model again"
            ) from error
        if not (Path(folder) / MLMODEL).is_file():
            raise registry_error(
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
    found = URI.fullmatch(uri)
    if found is None:
        raise registry_error(
            f"{uri!r} is not a registered model; expected models:/NAME@ALIAS, models:/NAME/VERSION"
            " or models:/NAME"
        )
    name, alias, number = found.groups()
    return name, alias, None if number == "latest" else number


def _checked(version: ModelVersion) -> RegistryModel:
    """Return a version if it may be a source."""
    model = RegistryModel.of(version)
    if ARTIFACT in version.tags:
        raise registry_error(
            f"{model.model_uri} is a frozen artifact (tag {ARTIFACT}), which cannot be a source;"
            f" name the model it was made from, or {MODELS}{model.name} for the newest version that"
            " is not frozen"
        )
    if not _usable(version):
        raise registry_error(
            f"{model.model_uri} is {version.status}"
            f" ({version.status_message or 'no reason given'}); log it again"
        )
    return model


def _search_models(client: MlflowClient, filter_string: str | None, token: str | None) -> PagedList:
    from mlflow.exceptions import MlflowException

    try:
        return client.search_registered_models(
            filter_string,
            max_results=MODELS_PAGE,
            order_by=["name ASC"],
            page_token=token,
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
        if registered.tags.get(KIND) == FROZEN:
            return None
        return _newest_usable(client, registered)
    if alias not in registered.aliases:
        return None
    version = client.get_model_version(registered.name, str(registered.aliases[alias]))
    return RegistryModel.of(version) if _usable(version) else None


def _newest_usable(client: MlflowClient, registered: RegisteredModel) -> RegistryModel | None:
    """Return the newest version that may be a source; it is searched for only if it is not the
    newest of all, which MLflow returns with the model.
    """
    latest = max(
        registered.latest_versions or (), key=lambda version: int(version.version), default=None
    )
    if latest is None:
        return None
    if _usable(latest):
        return RegistryModel.of(latest)
    versions: list[ModelVersion] = all_pages(
        lambda token: client.search_model_versions(
            named(registered.name),
            max_results=VERSIONS_PAGE,
            order_by=["version_number DESC"],
            page_token=token,
        )
    )
    return next((RegistryModel.of(version) for version in versions if _usable(version)), None)


def _usable(version: ModelVersion) -> bool:
    return ARTIFACT not in version.tags and str(version.status) == "READY"


@contextmanager
def registry_events(address: str | None) -> Iterator[Event]:
    """Listen for webhooks of MLflow's registry inside the block; yield what they set.

    Args:
        address: `HOST:PORT` to listen on; None listens nowhere.

    Raises:
        UsageError: the address is invalid, or in use.
    """
    happened = Event()
    if address is None:
        yield happened
        return
    host, _, port = address.rpartition(":")

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            """Answer 204; the content does not matter, since the registry is read again."""
            happened.set()
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    try:
        server = ThreadingHTTPServer((host, int(port)), Hook)
    except (OSError, ValueError, OverflowError) as error:
        raise UsageError(
            f"--webhook {address!r} cannot be listened on ({error}); give a free HOST:PORT"
        ) from error
    with server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield happened
        finally:
            server.shutdown()
