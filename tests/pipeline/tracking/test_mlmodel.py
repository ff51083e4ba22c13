"""Models of a real MLflow registry as sources: their files, and what the MLmodel says of them."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pytest
import torch
from mlflow import MlflowClient
from mlflow.models import ModelSignature
from mlflow.types import ColSpec, Schema, TensorSpec
from torch import nn

from freezer.errors import SourceError
from freezer.spec import declared_spec
from pipeline.tracking import Described, describe, download, resolve_model
from tests.support.models import Mlp, scripted_module, seeded
from tests.support.shown import empty_database

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
REQUIREMENTS = ["torch"]
"""Keeps mlflow from inferring requirements, which takes seconds."""


@pytest.fixture(scope="module")
def uri(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database, set as the tracking URI of mlflow.pytorch.log_model."""
    before, level = os.environ.get("MLFLOW_TRACKING_URI"), logging.getLogger("mlflow").level
    folder = tmp_path_factory.mktemp("registry")
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    database = empty_database(template, folder)
    mlflow.set_tracking_uri(database)
    mlflow.create_experiment("sources", artifact_location=(folder / "artifacts").as_uri())
    mlflow.set_experiment("sources")
    yield database
    logging.getLogger("mlflow").setLevel(level)
    mlflow.set_tracking_uri(before)


@pytest.fixture(scope="module")
def client(uri: str) -> MlflowClient:
    return MlflowClient(uri, uri)


@pytest.fixture(scope="module")
def log(uri: str) -> Callable[..., str]:
    """Logs a model and registers it; returns the version."""

    def logged(
        name: str, model: nn.Module | None = None, *, form: str = "pickle", **settings: Any
    ) -> str:
        with mlflow.start_run():
            info = mlflow.pytorch.log_model(
                model or seeded(Mlp),
                name="model",
                registered_model_name=name,
                serialization_format=form,
                pip_requirements=REQUIREMENTS,
                **settings,
            )
        return str(info.registered_model_version)

    return logged


# Its files


def fetched(uri: str, name: str, folder: Path) -> Path:
    return download(uri, resolve_model(uri, f"models:/{name}"), new_folder(folder / "model"))


def new_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def test_files_of_a_version_are_downloaded(
    uri: str, client: MlflowClient, log: Callable[..., str], tmp_path: Path
) -> None:
    log("whole", input_example=X)
    model = resolve_model(uri, "models:/whole")
    assert len(str(model.run_id)) == 32
    found = download(uri, model, new_folder(tmp_path / "model"))
    assert {"MLmodel", "input_example.json", "data"} <= {path.name for path in found.iterdir()}
    location = Path(client.get_model_version_download_uri("whole", "1").removeprefix("file://"))
    (location / "MLmodel").rename(location / "hidden")
    with pytest.raises(SourceError):
        download(uri, model, new_folder(tmp_path / "again"))
    shutil.rmtree(location)
    with pytest.raises(SourceError):
        download(uri, model, new_folder(tmp_path / "and again"))


# What it is


def test_torchscript_and_pickle_are_distinguished(
    uri: str, log: Callable[..., str], tmp_path: Path
) -> None:
    log("either", scripted_module(seeded(Mlp)), input_example=X)
    log("either", seeded(Mlp), input_example=X)
    first = describe(
        download(uri, resolve_model(uri, "models:/either/1"), new_folder(tmp_path / "1"))
    )
    newer = download(uri, resolve_model(uri, "models:/either/2"), new_folder(tmp_path / "2"))
    second = describe(newer)
    assert first.kind == "torchscript"
    assert second.kind == "pickle"
    for found in (first, second):
        assert found.inputs == [{"shape": ["batch", 4], "dtype": "float32"}]
        assert found.dims == {"batch": {"min": 1, "max": 8}}
        assert declared_spec(found.inputs, found.dims).style == "positional"
    old = newer / "data" / "model.pth"
    torch.save(seeded(Mlp), old, _use_new_zipfile_serialization=False)
    assert not zipfile.is_zipfile(old)
    assert describe(newer).kind == "pickle"


def test_describe_never_unpickles(uri: str, log: Callable[..., str], tmp_path: Path) -> None:
    log("evil", Evil(str(tmp_path / "was here")))
    folder = fetched(uri, "evil", tmp_path)
    assert describe(folder).kind == "pickle"
    assert not (tmp_path / "was here").exists()
    torch.load(folder / "data" / "model.pth", weights_only=False)
    assert (tmp_path / "was here").exists(), "the pickle would have run code"


class Evil(nn.Module):
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_logged_code_is_found(uri: str, log: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("VALUE = 1\n")
    log("with-code", code_paths=[str(tmp_path / "helper.py")])
    folder = fetched(uri, "with-code", tmp_path)
    found = describe(folder)
    assert found.code == (folder / "code",)
    assert (found.code[0] / "helper.py").is_file()


def tensor(dtype: str, shape: tuple[int, ...], name: str | None = None) -> TensorSpec:
    return TensorSpec(np.dtype(dtype), shape, name)


@pytest.fixture(scope="module")
def saved(uri: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Saves an MLP with a signature and an example; a folder as `download` gives it."""

    def make(specs: list[Any] | None, example: Any = None) -> Path:
        folder = tmp_path_factory.mktemp("saved") / "model"
        signature = False if specs is None else ModelSignature(Schema(specs))
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Operation with range is deprecated"
            )  # pandas to mlflow, of a frame's columns
            mlflow.pytorch.save_model(
                seeded(Mlp),
                str(folder),
                signature=signature,
                input_example=example,
                serialization_format="pickle",
                pip_requirements=REQUIREMENTS,
            )
        return folder

    return make


def fields(found: Described) -> tuple[Any, Any, dict[str, Any]]:
    """Inputs, dims, and dtype and shape of the samples."""
    samples = (found.samples or {}).items()
    sizes = {name: (array.dtype.name, array.shape) for name, array in samples}
    return found.inputs, found.dims, sizes


BATCH_8 = {"batch": {"min": 1, "max": 8}}


@pytest.mark.parametrize(
    ("specs", "example", "expected"),
    [
        (
            [tensor("float32", (-1, 4))],
            None,
            ([{"shape": ["batch", 4], "dtype": "float32"}], BATCH_8, {}),
        ),
        (
            [tensor("float32", (-1, 4), "x")],
            np.zeros((32, 4), np.float32),
            (
                {"x": {"shape": ["batch", 4], "dtype": "float32"}},
                {"batch": {"min": 1, "max": 32}},
                {"x": ("float32", (32, 4))},
            ),
        ),
        (
            [tensor("int64", (-1,), "ids"), tensor("int64", (-1,), "offsets")],
            {"ids": np.array([7, 5, 6]), "offsets": np.array([0])},
            (
                {
                    "ids": {"shape": ["batch"], "dtype": "int64", "range": [5, 7]},
                    "offsets": {"shape": ["batch_1"], "dtype": "int64", "range": [0, 0]},
                },
                {**BATCH_8, "batch_1": {"min": 1, "max": 8}},
                {"ids": ("int64", (3,)), "offsets": ("int64", (1,))},
            ),
        ),
        (None, None, (None, {}, {})),
        (
            [ColSpec("float", name) for name in "abcd"],
            pd.DataFrame(X, columns=list("abcd")),
            (
                [{"shape": ["batch", 4], "dtype": "float32"}],
                BATCH_8,
                {"input_0": ("float32", (2, 4))},
            ),
        ),
        (None, [1.0, 2.0], (None, {}, {})),
    ],
)
def test_inputs_are_derived_from_signature_and_example(
    saved: Callable[..., Path], specs: Any, example: Any, expected: Any
) -> None:
    found = describe(saved(specs, example))
    assert fields(found) == expected
    if found.inputs is not None:
        declared_spec(found.inputs, found.dims)


@pytest.mark.parametrize("given", [tensor("float32", (-1, -1)), tensor("str", (-1,), "text")])
def test_ambiguous_inputs_are_an_error(saved: Callable[..., Path], given: TensorSpec) -> None:
    folder = saved([given])
    with pytest.raises(SourceError) as caught:
        describe(folder)
    assert caught.value.code == "CP-REGISTRY-INPUTS"
    assert describe(folder, inputs=False).inputs is None


def test_damaged_files_are_reported(saved: Callable[..., Path]) -> None:
    folder = saved(None)
    text = (folder / "MLmodel").read_text()
    (folder / "MLmodel").write_text(text.replace("model_data: data", "model_data: ../elsewhere"))
    with pytest.raises(SourceError):
        describe(folder)
    (folder / "data" / "model.pth").unlink()
    for content in (text, "a: [", text.replace("  pytorch:", "  keras:")):
        (folder / "MLmodel").write_text(content)
        with pytest.raises(SourceError):
            describe(folder)
