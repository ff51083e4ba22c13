"""Models of a real MLflow registry as sources: which version a URI means, and which models are
listed.
"""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
from mlflow import MlflowClient

from freezer.errors import CatalogError, SourceError
from freezer.store import NAME
from pipeline.tracking import (
    list_registry,
    resolve_model,
    slug,
    source_models,
)
from tests.support.shown import empty_database

FROZEN = {"coldpress.artifact": "sha256:" + 64 * "a"}


@pytest.fixture(scope="module")
def registry(template: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A registry of models whose versions have tags but no files."""
    uri = empty_database(template, tmp_path_factory.mktemp("registry"))
    client = MlflowClient(uri, uri)
    versions: dict[str, list[dict[str, str]]] = {
        "digits": [{"n": "1"}, {"n": "2"}, FROZEN],
        "Credit Risk": [{}],
        'it\'s "quoted"': [{}, FROZEN],
        "digits-frozen": [FROZEN, FROZEN],
    }
    for name, tags in versions.items():
        client.create_registered_model(name, tags={"team": "risk" if "R" in name else "vision"})
        for own in tags:
            client.create_model_version(name, source="file:///nowhere", tags=own)
    client.create_registered_model("empty")
    client.set_registered_model_alias("digits", "champion", "1")
    client.set_registered_model_alias("digits", "cpu-x86-64-v4", "3")
    client.set_registered_model_alias("Credit Risk", "champion", "1")
    client.register_prompt("greeting", template="Hello {{name}}")
    return uri


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("models:/digits@champion", "1"),
        ("models:/digits/1", "1"),
        ("models:/digits", "2"),
        ("models:/digits/latest", "2"),
        ("models:/Credit Risk/1", "1"),
        ('models:/it\'s "quoted"', "1"),
    ],
)
def test_a_uri_means_one_version(registry: str, text: str, version: str) -> None:
    model = resolve_model(registry, text)
    name = text.removeprefix("models:/").partition("/")[0].partition("@")[0]
    assert (model.name, model.version, model.run_id, model.model_uri) == (
        name,
        version,
        None,
        f"models:/{name}/{version}",
    )


@pytest.mark.parametrize(
    "text",
    [
        "models:/digits/3",
        "models:/digits@cpu-x86-64-v4",
        "models:/digits-frozen",
        "models:/digits/9",
        "models:/digits@chamipon",
        "models:/digit",
        "models:/empty",
        "models:/",
        "models:/digits/1/data",
        "runs:/1234/model",
    ],
)
def test_an_unusable_uri_is_rejected(registry: str, text: str) -> None:
    with pytest.raises(SourceError) as caught:
        resolve_model(registry, text)
    assert caught.value.code == "CP-REGISTRY"


def test_a_version_that_is_not_ready_is_rejected(registry: str, tmp_path: Path) -> None:
    shutil.copy(registry.removeprefix("sqlite:///"), tmp_path / "mlflow.db")
    copy = f"sqlite:///{tmp_path}/mlflow.db"
    with sqlite3.connect(tmp_path / "mlflow.db") as connection:
        connection.execute(
            "UPDATE model_versions SET status = 'FAILED_REGISTRATION' WHERE name = 'digits' AND"
            " version = 2"
        )
    with pytest.raises(SourceError):
        resolve_model(copy, "models:/digits/2")
    assert resolve_model(copy, "models:/digits").version == "1"
    assert {model.name: model.version for model in list_registry(copy, None, None)}["digits"] == "1"


@pytest.mark.parametrize(
    ("filter_string", "alias", "expected"),
    [
        ("name LIKE 'dig%'", None, {"digits": "2"}),
        ("tags.team = 'risk'", None, {"Credit Risk": "1"}),
        (None, "champion", {"Credit Risk": "1", "digits": "1"}),
        ("tags.team = 'vision'", "champion", {"digits": "1"}),
        (None, "cpu-x86-64-v4", {}),
    ],
)
def test_list_registry_applies_filter_and_alias(
    registry: str, filter_string: str | None, alias: str | None, expected: dict[str, str]
) -> None:
    assert {
        model.name: model.version for model in list_registry(registry, filter_string, alias)
    } == expected


def test_an_invalid_filter_is_a_catalog_error(registry: str) -> None:
    with pytest.raises(CatalogError) as caught:
        list_registry(registry, "name =", None)
    assert caught.value.code == "CP-REGISTRY"


def test_list_registry_reads_all_pages(registry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_models, "MODELS_PAGE", 2)
    monkeypatch.setattr(source_models, "VERSIONS_PAGE", 1)
    assert [model.name for model in list_registry(registry, None, None)] == [
        "Credit Risk",
        "digits",
        'it\'s "quoted"',
    ]


def test_slugs_are_names_and_differ_where_names_do() -> None:
    names = ("resnet-50.v1_b", "Resnet-50.v1_b", "resnet 50.v1_b", "resnet_50.v1_b", "é", "é ", "-")
    slugs = [slug(name) for name in names]
    assert slugs[0] == names[0]
    assert len(set(slugs)) == len(names)
    assert all(NAME.fullmatch(made) for made in slugs)
