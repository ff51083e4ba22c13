"""Registered versions carry the code and the environment that MLflow serves them with."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import mlflow
import pytest

import freezer
from freezer.artifact import Artifact
from pipeline.tracking.model_files import REQUIREMENTS
from pipeline.tracking.projection import Projection
from tests.support.commands import finished
from tests.support.outcomes import X, outcome
from tests.support.projections import registered
from tests.support.raylets import ROOT

NAME = "served"
URI = f"models:/{NAME}@portable"

WITHOUT_FREEZER = """
import importlib.util, sys
from pathlib import Path
sys.path = [path for path in sys.path if not Path(path, "freezer").is_dir()]
assert importlib.util.find_spec("freezer") is None
import mlflow, numpy
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model(sys.argv[2])
import freezer
answer = model.predict(numpy.ones((2, 4), "float32"))
print(freezer.__file__, numpy.shape(answer), {"rich", "typer"} & set(sys.modules))
"""


@pytest.fixture
def version(projection: Projection, artifact: Artifact) -> Projection:
    """The projection of a campaign that registered one version of NAME."""
    registered(projection, outcome(NAME, artifact="sha256:" + 64 * "1"), artifact)
    return projection


def test_requirements_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = {
        text
        for text in project["project"]["dependencies"]
        if not text.startswith(("rich", "typer"))
    }
    assert {text for text in REQUIREMENTS if not text.startswith("mlflow")} == wheel


def test_a_version_loads_where_coldpress_is_not_installed(
    version: Projection, tmp_path: Path
) -> None:
    options = ("-I", "-W", "ignore", "-c", WITHOUT_FREEZER, version.client.tracking_uri, URI)
    done = finished(sys.executable, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    place, shape = done.stdout.split(maxsplit=1)
    assert place.endswith("/code/freezer.zip/freezer/__init__.py")
    assert shape.strip() == "(2, 3) set()"


def test_imported_code_is_not_mixed_with_a_versions(version: Projection) -> None:
    assert mlflow.pyfunc.load_model(URI).predict(X).shape == (2, 3)
    assert any(path.endswith("code/freezer.zip") for path in sys.path)
    own = Path(str(freezer.__file__)).parent
    loaded = [module for name, module in sys.modules.items() if name.partition(".")[0] == "freezer"]
    assert {Path(str(module.__file__)).is_relative_to(own) for module in loaded} == {True}
