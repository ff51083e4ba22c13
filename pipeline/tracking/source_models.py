"""Models of MLflow's registry as sources: which version a URI means, and its files.

A version that is a frozen artifact of ours is never a source. mlmodel.py reads what was downloaded.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from freezer.errors import CatalogError, SourceError
from freezer.store import NAME
from pipeline.tracking.connection import MISSING, MODELS, connect, quoted, reaching, resolve
from pipeline.tracking.mlmodel import MLMODEL
from pipeline.tracking.registry import ARTIFACT

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel
    from mlflow.store.entities import PagedList

SLUG_DIGITS = 8
SLUG_CHARS = 100

MODELS_PAGE = 1000
"""MLflow's limit of registered models in one response."""

VERSIONS_PAGE = 10_000
SEARCH_CHARS = 4000
"""Encoded characters of the names in one search of versions; they are part of a URL, which servers
limit to 8 KB.
"""

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
                aliases = ", ".join(
                    f"{known} (version {of})" for known, of in sorted(registered.aliases.items())
                )
                raise _registry_error(
                    f"model {name!r} has no alias {alias!r}; it has {aliases or 'none'}"
                )
        return _newest(client, name) if number is None else _numbered(client, name, str(number))


def list_registry(
    tracking_uri: str, filter_string: str | None, alias: str | None
) -> Iterator[RegistryModel]:
    """Yield one version of each registered model that matches, ordered by name.

    Models without such a version are omitted: models with only frozen versions, models without the
    alias, prompts.

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
            chosen = _choose(client, page, alias)
        for registered in page:
            if registered.name in chosen:
                yield chosen[registered.name]
        token = page.token
        if not token:
            return


def download(tracking_uri: str, model: RegistryModel, dest: Path) -> Path:
    """Download all files of a version: MLmodel, data, code, the input example. Nothing is executed.

    Args:
        tracking_uri: URI of MLflow.
        model: version to download.
        dest: an empty folder.

    Returns:
        The folder of the files, in `dest`.

    Raises:
        SourceError: the version's files are gone.
        InfrastructureError: MLflow or its artifact storage cannot be reached.
    """
    address = resolve(tracking_uri)
    client = connect(address)
    with reaching(address):
        return _download(client, model, dest)


def slug(name: str) -> str:
    """Return a registry's name as an entry's name; a valid name stays. Two names never share a
    slug.

    A changed name gets the first digits of its SHA-256: `Credit Risk (v2)` becomes
    `credit-risk-v2-` and 8 digits.
    """
    if NAME.fullmatch(name) and len(name) <= SLUG_CHARS:
        return name
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    words = re.sub(r"[^a-z0-9._]+", "-", plain)
    single = re.sub(r"[._-]*-[._-]*|[._]{2,}", "-", words)[:SLUG_CHARS].strip("._-")
    digest = hashlib.sha256(name.encode()).hexdigest()[:SLUG_DIGITS]
    return f"{single}-{digest}" if single else f"model-{digest}"


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
    """Return MLflow's record of a model, with its aliases; the error lists existing models, the
    most similar first.
    """
    from mlflow.exceptions import MlflowException

    try:
        return client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code not in MISSING:
            raise
    names = [
        model.name
        for model in client.search_registered_models(max_results=MODELS_PAGE, order_by=["name ASC"])
    ]
    near = difflib.get_close_matches(name, names, n=3)
    raise _registry_error(
        f"MLflow has no registered model {name!r}; it has"
        f" {_some([*near, *(n for n in names if n not in near)])}"
    )


def _numbered(client: MlflowClient, name: str, number: str) -> RegistryModel:
    """Return one version of an existing model."""
    from mlflow.exceptions import MlflowException

    try:
        version = client.get_model_version(name, number)
    except MlflowException as error:
        if error.error_code not in MISSING:
            raise
        existing = _some(str(version.version) for version in _versions(client, [name]))
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


def _newest(client: MlflowClient, name: str) -> RegistryModel:
    """Return the newest version of an existing model that is not a frozen artifact."""
    versions = list(_versions(client, [name]))
    for version in versions:
        if _usable(version):
            return RegistryModel.of(version)
    if any(ARTIFACT in version.tags for version in versions):
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
            code="CP-REGISTRY-FILTER",
        ) from None


def _choose(
    client: MlflowClient, page: Sequence[RegisteredModel], alias: str | None
) -> dict[str, RegistryModel]:
    """Return the version to use of each model, by name.

    MLflow returns a model with its newest version, which usually is the one; other versions are
    searched together.
    """
    chosen: dict[str, RegistryModel] = {}
    wanted: dict[str, str | None] = {}
    for registered in page:
        if alias is not None and alias not in registered.aliases:
            continue
        number = (
            None if alias is None else str(registered.aliases[alias])
        )  # an int from a database, a text from a server
        newest = max(
            registered.latest_versions or (), key=lambda version: int(version.version), default=None
        )
        if newest is not None and number in (None, str(newest.version)) and _usable(newest):
            chosen[registered.name] = RegistryModel.of(newest)
        else:
            wanted[registered.name] = number
    for version in _versions(client, list(wanted)):
        if (
            version.name not in chosen
            and _usable(version)
            and wanted[version.name] in (None, str(version.version))
        ):
            chosen[version.name] = RegistryModel.of(version)
    return chosen


def _versions(client: MlflowClient, names: Sequence[str]) -> Iterator[ModelVersion]:
    """Yield all versions of some models; the newest of each model first."""
    from mlflow.exceptions import MlflowException

    for searched in _batches(names):
        try:
            # MLflow parses a list as Python, the only form that supports every quote.
            yield from _search_versions(client, f"name IN ({', '.join(map(repr, searched))})")
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            for name in searched:  # servers before 3.17 search the versions of one model at a time
                yield from _search_versions(client, f"name = {quoted(name)}")


def _search_versions(client: MlflowClient, wanted: str) -> Iterator[ModelVersion]:
    token: str | None = None
    while True:
        page = client.search_model_versions(
            wanted, max_results=VERSIONS_PAGE, order_by=["version_number DESC"], page_token=token
        )
        yield from page
        token = page.token
        if not token:
            return


def _batches(names: Sequence[str]) -> Iterator[list[str]]:
    """Yield the names in lists of at most SEARCH_CHARS, or of one name."""
    batch: list[str] = []
    left = SEARCH_CHARS
    for name in names:
        num_chars = len(quote(f"{name!r}, "))
        if batch and num_chars > left:
            yield batch
            batch, left = [], SEARCH_CHARS
        batch.append(name)
        left -= num_chars
    if batch:
        yield batch


def _usable(version: ModelVersion) -> bool:
    return ARTIFACT not in version.tags and str(version.status) == "READY"


def _some(names: Iterable[str]) -> str:
    known = list(names)
    more = f" and {len(known) - _NUM_NAMED} more" if len(known) > _NUM_NAMED else ""
    return f"{', '.join(known[:_NUM_NAMED])}{more}" if known else "none"


def _registry_error(message: str) -> SourceError:
    return SourceError(message, code="CP-REGISTRY")


def _download(client: MlflowClient, model: RegistryModel, dest: Path) -> Path:
    from mlflow.artifacts import download_artifacts, list_artifacts

    location = client.get_model_version_download_uri(model.name, model.version)
    if location.startswith(MODELS):  # a logged model, which only the tracking server can resolve
        location = client.get_logged_model(location.removeprefix(MODELS)).artifact_location
    try:
        folder = download_artifacts(
            artifact_uri=location,
            dst_path=str(dest),
            tracking_uri=client.tracking_uri,
            registry_uri=client.tracking_uri,
        )
    # every storage has its own errors; a listing separates missing files from a missing storage
    except Exception as error:
        if MLMODEL in {
            item.path
            for item in list_artifacts(artifact_uri=location, tracking_uri=client.tracking_uri)
        }:
            raise
        raise _registry_error(
            f"the files of {model.model_uri} are gone from {location}; log the model again"
        ) from error
    if not (Path(folder) / MLMODEL).is_file():
        raise _registry_error(
            f"{model.model_uri} has no {MLMODEL} file in {location}; log the model again"
        )
    return Path(folder)
