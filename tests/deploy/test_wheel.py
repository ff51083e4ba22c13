"""The wheel in an environment of its own: contents, dependencies, and a deployment without a
compiler.
"""

from __future__ import annotations

import json
import re
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import freezer
from freezer.store import Store
from tests.conftest import Frozen
from tests.deploy.conftest import LEVEL
from tests.support.commands import Done, finished, output
from tests.support.models import TinyConv, seeded
from tests.support.raylets import ROOT
from tests.support.steps import artifact_of, quickly, random_inputs, write_plain_artifact

pytestmark = pytest.mark.skipif(LEVEL is None, reason="needs a CPU of x86-64-v3 or better")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    dest = tmp_path_factory.mktemp("wheel")
    output(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", dest, ROOT)
    (built,) = dest.glob("*.whl")
    return built


def environment_of(wheel: Path, extra: str, folder: Path) -> Path:
    """The bin folder of an environment with only the wheel and one of its extras."""
    venv.create(folder, with_pip=True)
    pip = (folder / "bin" / "python", "-m", "pip", "install", "-qq", "--no-compile")
    output(*pip, f"{wheel}[{extra}]", "-c", ROOT / "constraints.txt")
    return folder / "bin"


@pytest.fixture(scope="session")
def deployed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_of(wheel, "torch", tmp_path_factory.mktemp("deployed"))


def run(deployed: Path, home: Path, *command: object) -> Done:
    """Run a command of the deployment with an empty PATH, cache and home folder."""
    environ = {
        "PATH": str(home / "nothing"),
        "HOME": str(home),
        "TORCHINDUCTOR_CACHE_DIR": str(home / "cache"),
    }
    full = [deployed / str(command[0]), *command[1:]]
    return finished(*full, env=environ, cwd=home, timeout_s=120)


def test_the_wheel_holds_only_freezer_and_needs_few_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
        (metadata,) = (
            archive.read(name).decode()
            for name in archive.namelist()
            if name.endswith(".dist-info/METADATA")
        )
    assert {top for top in tops if not top.endswith(".dist-info")} == {"freezer"}
    extras = set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE))
    assert extras == {
        "onnxruntime",
        "openvino",
        "quantization",
        "registry",
        "signing",
        "stores",
        "torch",
    }, "none for campaigns"
    needed = set(re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", metadata, re.MULTILINE))
    assert needed == {"archspec", "numpy", "nvidia-ml-py", "rich", "safetensors", "typer"}


@pytest.mark.slow
def test_a_pulled_artifact_runs_without_a_compiler(
    deployed: Path, inductor: Frozen, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    Store.open(str(store), create=True).publish(
        "conv", source_key="test", artifacts=[inductor.artifact]
    )
    pulled = run(
        deployed, tmp_path, "coldpress", "pull", "conv", "--store", str(store), "--dest", "pulled"
    )
    assert pulled.returncode == 0, pulled.stderr
    threads = ("--threads", str(inductor.artifact.manifest.payloads[0].num_threads))
    verified = run(deployed, tmp_path, "coldpress", "verify", "pulled/", *threads)
    assert verified.returncode == 0, verified.stderr
    x = random_inputs(2, 3, 16, 16)
    save_file({"x": x}, tmp_path / "in.safetensors")
    files = ("--input", "in.safetensors", "--output", "out.safetensors")
    ran = run(deployed, tmp_path, "coldpress", "run", "pulled/", *files, *threads)
    assert ran.returncode == 0, ran.stderr
    with torch.no_grad():
        expected = inductor.model(x)
    (answer,) = load_file(tmp_path / "out.safetensors").values()
    torch.testing.assert_close(answer, expected)
    assert not list((tmp_path / "cache").rglob("*")), "something was compiled"


@pytest.mark.slow
def test_an_engine_serves_without_torch(wheel: Path, tmp_path: Path) -> None:
    """The environment has no torch; the answers are those of the model."""
    lean = environment_of(wheel, "onnxruntime", tmp_path / "lean")
    (site,) = (tmp_path / "lean").glob("lib/python3*/site-packages")
    assert not (site / "torch").exists()
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    assert size < 250e6, "pip, numpy and ONNX Runtime are most of it"
    x = random_inputs(2, 3, 16, 16)
    made = artifact_of(quickly(seeded(TinyConv), {"x": x}, tmp_path / "made", "onnxruntime"))
    save_file({"x": x}, tmp_path / "in.safetensors")
    files = ("--input", "in.safetensors", "--output", "out.safetensors")
    for command in (("verify", "made/"), ("run", "made/", *files), ("doctor",)):
        done = run(lean, tmp_path, "coldpress", *command)
        assert done.returncode == 0, done.stdout + done.stderr
    (answer,) = load_file(tmp_path / "out.safetensors").values()
    torch.testing.assert_close(answer, freezer.load(made.folder)(x))
    refused = run(lean, tmp_path, "coldpress", "verify", "made/", "--speed")
    assert (refused.returncode, "CP-DEPENDENCY" in refused.stderr) == (2, True), refused.stderr


@pytest.mark.slow
def test_doctor_and_list_need_the_wheel_alone(deployed: Path, tmp_path: Path) -> None:
    Store.open(str(tmp_path / "store"), create=True).publish(
        "tiny", source_key="test", artifacts=[write_plain_artifact(tmp_path / "one")]
    )
    listed = run(deployed, tmp_path, "coldpress", "list")
    assert (listed.returncode, listed.stdout.split()[8:10]) == (0, ["tiny", "1"]), listed.stderr
    checked = run(deployed, tmp_path, "coldpress", "doctor", "--store", "store", "--json")
    assert checked.returncode == 0, checked.stdout
    levels = {item["check"]: item["level"] for item in json.loads(checked.stdout)["findings"]}
    assert levels["Ray"] == levels["MLflow"] == levels["store"] == "ok"
    assert levels["compiler"] == "warning"
