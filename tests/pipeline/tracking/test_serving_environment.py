"""Registered versions carry the code and the environment that MLflow serves them with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlflow
import pytest
import torch
from torch import nn

import freezer
from freezer.artifact import Artifact
from pipeline.tracking.model_files import REQUIREMENTS
from pipeline.tracking.projection import Projection
from tests.support.outcomes import X, outcome
from tests.support.projections import registered
from tests.support.raylets import LOOPBACK, ROOT, free_port

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


@contextmanager
def serving(folder: Path, tracking_uri: str) -> Iterator[str]:
    """Run `mlflow models serve` in the environment of the tests; its URL."""
    port, binaries = free_port(), Path(sys.executable).parent
    environ = {
        **os.environ,
        "MLFLOW_TRACKING_URI": tracking_uri,
        "PATH": f"{binaries}:{os.environ['PATH']}",
    }
    command = [
        str(binaries / "mlflow"),
        "models",
        "serve",
        "-m",
        URI,
        "--env-manager",
        "local",
        "-h",
        LOOPBACK,
        "-p",
        str(port),
    ]
    url, log = f"http://{LOOPBACK}:{port}", folder / "serve.log"
    with (
        log.open("w") as file,
        subprocess.Popen(
            command, cwd=folder, env=environ, stdout=file, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            deadline = time.monotonic() + 120
            while not answers(f"{url}/ping"):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def test_requirements_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = {
        text
        for text in project["project"]["dependencies"]
        if not text.startswith(("rich", "typer", "torch"))
    }
    assert {text for text in REQUIREMENTS if not text.startswith("mlflow")} == wheel


def test_a_version_loads_where_coldpress_is_not_installed(
    version: Projection, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-I",
        "-W",
        "ignore",
        "-c",
        WITHOUT_FREEZER,
        version.client.tracking_uri,
        URI,
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    place, shape = done.stdout.split(maxsplit=1)
    assert place.endswith("/code/freezer.zip/freezer/__init__.py")
    assert shape.strip() == "(2, 3) set()"


def test_imported_code_is_not_mixed_with_a_versions(version: Projection) -> None:
    model = mlflow.pyfunc.load_model(URI)
    assert model.predict(X).shape == (2, 3)
    assert any(path.endswith("code/freezer.zip") for path in sys.path)
    own = Path(str(freezer.__file__)).parent
    loaded = [module for name, module in sys.modules.items() if name.partition(".")[0] == "freezer"]
    assert {Path(str(module.__file__)).is_relative_to(own) for module in loaded} == {True}


@pytest.mark.slow
def test_mlflow_serves_a_version(version: Projection, source: nn.Module, tmp_path: Path) -> None:
    with serving(tmp_path, version.client.tracking_uri) as url:
        body = json.dumps({"inputs": {"x": X.tolist()}}).encode()
        request = urllib.request.Request(
            f"{url}/invocations", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            found = json.load(response)["predictions"]
    torch.testing.assert_close(
        torch.tensor(found), source(torch.from_numpy(X)).detach(), rtol=1e-5, atol=1e-6
    )
