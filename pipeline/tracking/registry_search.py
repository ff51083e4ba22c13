"""What a registry holds: its models and their versions, found with few requests. source_models.py is the door to it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freezer.errors import CatalogError, SourceError
from pipeline.tracking.connection import listed
from pipeline.tracking.registry import ARTIFACT

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel
    from mlflow.store.entities import PagedList

SCHEME = "models:/"

MODELS_PAGE = 1000
"""What MLflow gives at most of registered models in one answer."""

VERSIONS_PAGE = 10_000
SEARCH_CHARS = 1500
"""Of names in one search of versions: they travel in a URL, which servers cut at 8 KB or more."""

NAMED = 20
"""How many of the models or versions that exist are named to a person."""

NOT_THERE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")


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


def registered_model(client: MlflowClient, name: str) -> RegisteredModel:
    """MLflow's own record of a model, with its aliases.

    Raises:
        SourceError: there is none; the message lists those that there are.
    """
    from mlflow.exceptions import MlflowException

    try:
        return client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code not in NOT_THERE:
            raise
    names = [model.name for model in client.search_registered_models(max_results=MODELS_PAGE, order_by=["name ASC"])]
    near = difflib.get_close_matches(name, names, n=3)
    raise not_there(f"MLflow has no registered model {name!r}; it has {_some([*near, *(n for n in names if n not in near)])}")


def version_of(client: MlflowClient, name: str, number: str) -> RegistryModel:
    """One version of a model that is there.

    Raises:
        SourceError: there is no such version, it is not ready, or it is a frozen artifact.
    """
    from mlflow.exceptions import MlflowException

    try:
        return _checked(client.get_model_version(name, number))
    except MlflowException as error:
        if error.error_code not in NOT_THERE:
            raise
    existing = _some(str(version.version) for version in _versions(client, [name]))
    raise not_there(f"model {name!r} has no version {number!r}; it has {existing}")


def newest_of(client: MlflowClient, name: str) -> RegistryModel:
    """The newest version of a model that is there and is no frozen artifact.

    Raises:
        SourceError: there is none.
    """
    versions = list(_versions(client, [name]))
    for version in versions:
        if _usable(version):
            return model_of(version)
    if any(ARTIFACT in version.tags for version in versions):
        raise not_there(
            f"all versions of model {name!r} are frozen artifacts (tag {ARTIFACT}) or not ready; name the model that they were "
            "made from"
        )
    raise not_there(f"model {name!r} has no version that is ready; log one with mlflow.pytorch.log_model")


def search_models(client: MlflowClient, filter_string: str | None, token: str | None) -> PagedList:
    """One page of the registered models that match a filter, in the order of names.

    Raises:
        CatalogError: MLflow does not understand the filter.
    """
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


def choose(client: MlflowClient, page: Sequence[RegisteredModel], alias: str | None) -> dict[str, RegistryModel]:
    """By name, the version to take of each model of a page; models that have none are missing.

    A model comes with its newest version, which nearly always is the one; the versions of the others are searched for together.
    """
    chosen: dict[str, RegistryModel] = {}
    wanted: dict[str, str | None] = {}
    for registered in page:
        if alias is not None and alias not in registered.aliases:
            continue
        number = None if alias is None else str(registered.aliases[alias])  # a database gives an int, a server a text
        newest = sorted(registered.latest_versions or (), key=lambda version: int(version.version), reverse=True)
        candidates = newest[:1] if number is None else [item for item in newest if str(item.version) == number]
        if candidates and _usable(candidates[0]):
            chosen[registered.name] = model_of(candidates[0])
        elif number is None or not candidates:
            wanted[registered.name] = number
    for version in _versions(client, list(wanted)):
        number = wanted[version.name]
        if version.name not in chosen and _usable(version) and number in (None, str(version.version)):
            chosen[version.name] = model_of(version)
    return chosen


def model_of(version: ModelVersion) -> RegistryModel:
    """MLflow's record of a version, as ours."""
    return RegistryModel(
        name=str(version.name),
        version=str(version.version),
        run_id=version.run_id or None,
        tags=dict(version.tags),
        model_uri=f"{SCHEME}{version.name}/{version.version}",
    )


def not_there(message: str) -> SourceError:
    """The error of something that a registry does not hold, or holds only as what is no source."""
    return SourceError(message, code="CP-REGISTRY")


def _checked(version: ModelVersion) -> RegistryModel:
    uri = f"{SCHEME}{version.name}/{version.version}"
    if ARTIFACT in version.tags:
        raise not_there(
            f"{uri} is a frozen artifact (tag {ARTIFACT}), which is never a source; name the model that it was made from, or "
            f"{SCHEME}{version.name} for the newest version that is not frozen"
        )
    if not _usable(version):
        raise not_there(f"{uri} is {version.status} ({version.status_message or 'no reason given'}); log it again, or name another")
    return model_of(version)


def _usable(version: ModelVersion) -> bool:
    return ARTIFACT not in version.tags and str(version.status) == "READY"


def _some(names: Iterable[str]) -> str:
    known = list(names)
    more = f" and {len(known) - NAMED} more" if len(known) > NAMED else ""
    return f"{', '.join(known[:NAMED])}{more}" if known else "none"


def _versions(client: MlflowClient, names: Sequence[str]) -> Iterator[ModelVersion]:
    """All versions of some models, newest first."""
    for together in _searches(names):
        token: str | None = None
        while True:
            page = client.search_model_versions(
                f"name IN {listed(together)}", max_results=VERSIONS_PAGE, order_by=["version_number DESC"], page_token=token
            )
            yield from page
            token = page.token
            if not token:
                break


def _searches(names: Sequence[str]) -> Iterator[list[str]]:
    """The names, as many together as one search takes."""
    together: list[str] = []
    for name in names:
        if together and sum(map(len, together)) + len(name) > SEARCH_CHARS:
            yield together
            together = []
        together.append(name)
    if together:
        yield together
