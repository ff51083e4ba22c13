"""ONNX payloads where they serve: fresh processes, many threads, damage, a missing package, an
older one.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from freezer.artifact import Artifact
from freezer.errors import install_command
from freezer.serving.compatibility import refusal_of
from freezer.serving.load import process_here
from freezer.serving.process import LoadOptions
from tests.support.models_engines import convnet
from tests.support.steps import BATCH, artifact_of, python, quickly, random_inputs

IMAGE = random_inputs(3, 3, 8, 8)

SERVE = """
import sys, torch, freezer
model = freezer.load(sys.argv[1])
answer = model(image=torch.load(sys.argv[2]))
print(model.manifest.recipe.name, answer["map"].stride())
torch.save(dict(answer), sys.argv[3])
"""

WITHOUT = """
import sys, freezer
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "onnxruntime":
            raise ModuleNotFoundError("No module named 'onnxruntime'")
sys.meta_path.insert(0, Blocked())
from freezer.runtime.native import ENGINE_OPENERS
from pathlib import Path
try:
    ENGINE_OPENERS["onnxruntime"](Path(sys.argv[1]), {}, 1)
except freezer.errors.MissingDependencyError as error:
    print(error.coded)
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A convnet for batch 1 to 4; read-only."""
    out, x = tmp_path_factory.mktemp("onnxruntime") / "conv", random_inputs(2, 3, 8, 8)
    dims = {"image": {0: BATCH}}
    return artifact_of(quickly(convnet(), {"image": x}, out, "onnxruntime", dims=dims))


def test_manifest_names_the_engine(artifact: Artifact) -> None:
    import onnxruntime

    manifest = artifact.manifest
    assert {payload.kind for payload in manifest.payloads} == {"onnxruntime"}
    assert onnxruntime.__version__.startswith(manifest.needs.packages["onnxruntime"])
    assert {"onnxruntime", "onnx", "onnxscript"} <= set(manifest.toolchain)


def test_fresh_process_answers_alike(artifact: Artifact, tmp_path: Path) -> None:
    torch.save(IMAGE, tmp_path / "image.pt")
    environ = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    said = python(
        SERVE, artifact.folder, tmp_path / "image.pt", tmp_path / "answer.pt", env=environ
    )
    assert not [*tmp_path.rglob("Microsoft")], "ONNX Runtime's telemetry keeps an id there"
    assert said.split(maxsplit=1) == ["onnxruntime", "(512, 1, 64, 8)\n"]
    with torch.no_grad():
        expected = convnet()(IMAGE)
    torch.testing.assert_close(torch.load(tmp_path / "answer.pt"), expected, atol=1e-5, rtol=1e-4)


def test_missing_package_names_the_command(artifact: Artifact) -> None:
    said = python(WITHOUT, artifact.folder / artifact.manifest.payloads[0].path)
    assert said.startswith("CP-DEPENDENCY: ")
    assert install_command("onnxruntime") in said


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        ({"onnxruntime": "999.0.0"}, None),  # the canary decides about newer ones
        ({"onnxruntime": "1.2.0"}, "runtime_too_old"),
        ({}, "runtime_missing"),
    ],
)
def test_engine_is_not_missing_or_older(
    artifact: Artifact, installed: dict[str, str], reason: str | None
) -> None:
    process = process_here(LoadOptions(), ())
    assert refusal_of(artifact.manifest, process) is None
    refusal = refusal_of(artifact.manifest, replace(process, engines=installed))
    assert (refusal.reason if refusal else None) == reason
