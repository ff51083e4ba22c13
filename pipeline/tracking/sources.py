"""Models of MLflow's registry, as sources: which version is meant, its files, and what its MLmodel says of them.

    resolve_model   models:/NAME@ALIAS and its kin -> one version
    list_registry   all models of a registry that match a filter -> one version each
    download        its files, whole or not at all
    describe        the file to load, and inputs from the signature and the input example; nothing is unpickled

A version that is a frozen artifact of ours is never a source.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from freezer.errors import CatalogError, SourceError, UsageError
from freezer.store import NAME
from pipeline.tracking.connection import connect, listed, reaching, resolve
from pipeline.tracking.described import MLMODEL, Described, describe
from pipeline.tracking.registry import ARTIFACT

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel
    from mlflow.store.entities import PagedList

__all__ = ["Described", "RegistryModel", "describe", "download", "list_registry", "resolve_model", "slug"]

SCHEME = "models:/"
MODELS_PAGE = 1000
"""What MLflow gives at most of registered models in one answer."""

VERSIONS_PAGE = 10_000
NAMES_PER_SEARCH = 50
"""Names in one search of versions: they travel in a URL, which servers cut at 8 KB or more."""

LISTED = 20
"""How many of the models or versions that exist are named to a person."""

SLUG_DIGITS = 8
SLUG_CHARS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistryModel:
    """One version of a registered model.

    Attributes:
        name: the registry's own, any text without `/` and `:`.
        version: a number, as text.
        run_id: of the run that made it; None where there is none.
        tags: of the version.
        model_uri: `models:/NAME/VERSION`.
    """

    name: str
    version: str
    run_id: str | None
    tags: Mapping[str, str]
    model_uri: str


def resolve_model(tracking_uri: str, uri: str) -> RegistryModel:
    """The version that a URI means.

    Args:
        tracking_uri: of MLflow, whose registry is asked.
        uri: `models:/NAME@ALIAS`, `models:/NAME/VERSION`, or `models:/NAME` and `models:/NAME/latest` for the newest version that
            is no frozen artifact.

    Raises:
        SourceError: there is no such model, alias or version, it is not ready, or it is a frozen artifact.
        InfrastructureError: MLflow cannot be reached.
    """
    name, alias, number = _parse(uri)
    address = resolve(tracking_uri)
    client = connect(address)
    with reaching(address):
        registered = _registered(client, name)
        if alias is not None:
            number = registered.aliases.get(alias)
            if number is None:
                aliases = ", ".join(f"{known} (version {of})" for known, of in sorted(registered.aliases.items()))
                raise _unknown(f"model {name!r} has no alias {alias!r}; it has {aliases or 'none'}")
        if number is None:
            return _newest(client, name)
        return _checked(_version(client, name, str(number)))


def list_registry(tracking_uri: str, filter_string: str | None, alias: str | None) -> Iterator[RegistryModel]:
    """One version of each registered model that matches, in the order of names.

    It is the newest version that is no frozen artifact, or the version of an alias. Models that have none are left out: those of
    which all versions are frozen, and those without the alias. Prompts, which MLflow keeps among the models, are left out too.

    Args:
        tracking_uri: of MLflow, whose registry is asked.
        filter_string: as `MlflowClient.search_registered_models` takes it; None takes all.
        alias: as `champion`; None takes the newest.

    Raises:
        CatalogError: MLflow does not understand the filter.
        InfrastructureError: MLflow cannot be reached.
    """
    address = resolve(tracking_uri)
    client = connect(address)
    token: str | None = None
    while True:
        with reaching(address):
            page = _search_models(client, filter_string, token)
            chosen = _chosen(client, page, alias)
        for registered in page:
            if registered.name in chosen:
                yield _model(chosen[registered.name])
        token = page.token
        if not token:
            return


def download(tracking_uri: str, model: RegistryModel, dest: Path) -> Path:
    """The folder `dest` with all files of a version: MLmodel, data, code, the input example. Nothing of it is run.

    Args:
        tracking_uri: of MLflow.
        model: from `resolve_model` or `list_registry`.
        dest: an empty folder, or one that does not exist yet; it is filled at once, when everything has arrived.

    Raises:
        SourceError: the version's files are gone.
        InfrastructureError: MLflow or its artifact storage cannot be reached.
        UsageError: `dest` holds something.
    """
    if dest.is_dir() and any(dest.iterdir()):
        raise UsageError(f"{dest} is not empty; expected an empty folder for the files of {model.model_uri}")
    address = resolve(tracking_uri)
    client = connect(address)
    dest.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", dir=dest.parent))
    try:
        with reaching(address):
            folder = _download(client, model, staging)
        if not (folder / MLMODEL).is_file():
            raise SourceError(
                f"{model.model_uri} holds no {MLMODEL} file: its files are gone from MLflow's storage; log the model again",
                code="CP-REGISTRY",
            )
        os.replace(folder, dest)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return dest


def slug(name: str) -> str:
    """A registry's own name as the name of an entry; a name that is one already stays. Two names never share a slug.

    Where the name has to change, the first digits of its SHA-256 follow: `Credit Risk (v2)` gives `credit-risk-v2-` and 8 digits.
    """
    if NAME.fullmatch(name) and len(name) <= SLUG_CHARS:
        return name
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    words = re.sub(r"[^a-z0-9._]+", "-", plain)
    single = re.sub(r"[._-]*-[._-]*|[._]{2,}", "-", words)[:SLUG_CHARS].strip("._-")
    digest = hashlib.sha256(name.encode()).hexdigest()[:SLUG_DIGITS]
    return f"{single}-{digest}" if single else f"model-{digest}"


def _parse(uri: str) -> tuple[str, str | None, str | None]:
    """Name, alias and version of a URI; no version means the newest."""
    rest = uri.removeprefix(SCHEME)
    name, slash, number = rest.partition("/")
    alias: str | None = None
    if not slash and "@" in rest:
        name, _, alias = rest.rpartition("@")
    if not uri.startswith(SCHEME) or not name or alias == "" or (slash and not number) or "/" in number:
        raise SourceError(
            f"{uri!r} names no registered model; expected models:/NAME@ALIAS, models:/NAME/VERSION or models:/NAME",
            code="CP-REGISTRY",
        )
    return name, alias, number if number not in ("", "latest") else None


def _registered(client: MlflowClient, name: str) -> RegisteredModel:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
    names = [model.name for model in client.search_registered_models(max_results=MODELS_PAGE, order_by=["name ASC"])]
    near = difflib.get_close_matches(name, names, n=3)
    raise _unknown(f"MLflow has no registered model {name!r}; it has {_some([*near, *(n for n in names if n not in near)])}")


def _version(client: MlflowClient, name: str, number: str) -> ModelVersion:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version(name, number)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
    existing = _some(str(version.version) for version in _versions(client, [name]))
    raise _unknown(f"model {name!r} has no version {number!r}; it has {existing}")


def _some(names: Iterable[str]) -> str:
    all_of = list(names)
    more = f" and {len(all_of) - LISTED} more" if len(all_of) > LISTED else ""
    return f"{', '.join(all_of[:LISTED])}{more}" if all_of else "none"


def _unknown(message: str) -> SourceError:
    return SourceError(message, code="CP-REGISTRY")


def _newest(client: MlflowClient, name: str) -> RegistryModel:
    versions = list(_versions(client, [name]))
    for version in versions:
        if _usable(version):
            return _model(version)
    if any(ARTIFACT in version.tags for version in versions):
        raise _unknown(
            f"all versions of model {name!r} are frozen artifacts (tag {ARTIFACT}) or not ready; name the model that they were "
            "made from"
        )
    raise _unknown(f"model {name!r} has no version that is ready; log one with mlflow.pytorch.log_model")


def _checked(version: ModelVersion) -> RegistryModel:
    uri = f"{SCHEME}{version.name}/{version.version}"
    if ARTIFACT in version.tags:
        raise _unknown(
            f"{uri} is a frozen artifact (tag {ARTIFACT}), which is never a source; name the model that it was made from, or "
            f"{SCHEME}{version.name} for the newest version that is not frozen"
        )
    if not _usable(version):
        raise _unknown(f"{uri} is {version.status} ({version.status_message or 'no reason given'}); log it again, or name another")
    return _model(version)


def _usable(version: ModelVersion) -> bool:
    return ARTIFACT not in version.tags and str(version.status) == "READY"


def _model(version: ModelVersion) -> RegistryModel:
    return RegistryModel(
        name=str(version.name),
        version=str(version.version),
        run_id=version.run_id or None,
        tags=dict(version.tags),
        model_uri=f"{SCHEME}{version.name}/{version.version}",
    )


def _search_models(client: MlflowClient, filter_string: str | None, token: str | None) -> PagedList:
    from mlflow.exceptions import MlflowException

    try:
        return client.search_registered_models(filter_string, max_results=MODELS_PAGE, order_by=["name ASC"], page_token=token)
    except MlflowException as error:
        if error.error_code != "INVALID_PARAMETER_VALUE":
            raise
        raise CatalogError(
            f"MLflow does not understand the filter {filter_string!r}: {error.message}; expected a filter of registered models, "
            "as \"name LIKE 'credit-%' AND tags.team = 'risk'\"",
            code="CP-REGISTRY-FILTER",
        ) from None


def _chosen(client: MlflowClient, page: Sequence[RegisteredModel], alias: str | None) -> dict[str, ModelVersion]:
    """The version to take of each model of a page; models that have none are missing.

    A model comes with its newest version, which nearly always is the one; the versions of the others are searched for together.
    """
    chosen: dict[str, ModelVersion] = {}
    wanted: dict[str, str | None] = {}
    for registered in page:
        if alias is not None and alias not in registered.aliases:
            continue
        number = None if alias is None else str(registered.aliases[alias])  # a database gives an int, a server a text
        newest = sorted(registered.latest_versions or (), key=lambda version: int(version.version), reverse=True)
        candidates = newest[:1] if number is None else [item for item in newest if str(item.version) == number]
        if candidates and _usable(candidates[0]):
            chosen[registered.name] = candidates[0]
        elif not (candidates and alias):
            wanted[registered.name] = number
    for version in _versions(client, list(wanted)):
        number = wanted[version.name]
        if version.name not in chosen and _usable(version) and number in (None, str(version.version)):
            chosen[version.name] = version
    return chosen


def _versions(client: MlflowClient, names: Sequence[str]) -> Iterator[ModelVersion]:
    """All versions of some models, newest first."""
    for start in range(0, len(names), NAMES_PER_SEARCH):
        wanted = f"name IN {listed(names[start : start + NAMES_PER_SEARCH])}"
        token: str | None = None
        while True:
            page = client.search_model_versions(
                wanted, max_results=VERSIONS_PAGE, order_by=["version_number DESC"], page_token=token
            )
            yield from page
            token = page.token
            if not token:
                break


def _download(client: MlflowClient, model: RegistryModel, staging: Path) -> Path:
    """Where a version's files lie now, under `staging`."""
    from mlflow.artifacts import download_artifacts

    location = client.get_model_version_download_uri(model.name, model.version)
    if location.startswith(SCHEME):  # a logged model, which only the tracking side can resolve
        location = client.get_logged_model(location.removeprefix(SCHEME)).artifact_location
    try:
        return Path(
            download_artifacts(
                artifact_uri=location, dst_path=str(staging), tracking_uri=client.tracking_uri, registry_uri=client.tracking_uri
            )
        )
    except OSError as error:
        if "No such" not in str(error):
            raise
        raise SourceError(
            f"the files of {model.model_uri} are gone from {location}; log the model again", code="CP-REGISTRY"
        ) from error
