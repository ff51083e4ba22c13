"""Models of MLflow's registry, as sources: which version is meant, its files, and what its MLmodel says of them.

    resolve_model   models:/NAME@ALIAS and its kin -> one version
    list_registry   all models of a registry that match a filter -> one version each
    download        its files, whole or not at all
    describe        the file to load, and inputs from the signature and the input example; nothing is unpickled

A version that is a frozen artifact of ours is never a source.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from freezer.errors import SourceError, UsageError
from freezer.store.store import NAME
from pipeline.tracking.connection import connect, reaching, resolve
from pipeline.tracking.mlmodel import MLMODEL, Described, describe
from pipeline.tracking.registry_search import (
    SCHEME,
    RegistryModel,
    choose,
    newest_of,
    not_there,
    registered_model,
    search_models,
    version_of,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["Described", "RegistryModel", "describe", "download", "list_registry", "resolve_model", "slug"]

SLUG_DIGITS = 8
SLUG_CHARS = 100


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
        registered = registered_model(client, name)
        if alias is not None:
            number = registered.aliases.get(alias)
            if number is None:
                aliases = ", ".join(f"{known} (version {of})" for known, of in sorted(registered.aliases.items()))
                raise not_there(f"model {name!r} has no alias {alias!r}; it has {aliases or 'none'}")
        return newest_of(client, name) if number is None else version_of(client, name, str(number))


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
            page = search_models(client, filter_string, token)
            chosen = choose(client, page, alias)
        for registered in page:
            if registered.name in chosen:
                yield chosen[registered.name]
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
        folder.chmod(0o755)
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


def _download(client: MlflowClient, model: RegistryModel, staging: Path) -> Path:
    """Where a version's files lie now, under `staging`."""
    from mlflow.artifacts import download_artifacts, list_artifacts

    location = client.get_model_version_download_uri(model.name, model.version)
    if location.startswith(SCHEME):  # a logged model, which only the tracking side can resolve
        location = client.get_logged_model(location.removeprefix(SCHEME)).artifact_location
    try:
        folder = download_artifacts(
            artifact_uri=location, dst_path=str(staging), tracking_uri=client.tracking_uri, registry_uri=client.tracking_uri
        )
    except Exception as error:  # every storage has its own; whether it answers tells a lost model from a lost storage
        if MLMODEL in {item.path for item in list_artifacts(artifact_uri=location, tracking_uri=client.tracking_uri)}:
            raise
        raise not_there(f"the files of {model.model_uri} are gone from {location}; log the model again") from error
    if not (Path(folder) / MLMODEL).is_file():
        raise not_there(f"{model.model_uri} holds no {MLMODEL} file in {location}; log the model again")
    return Path(folder)
