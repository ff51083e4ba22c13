"""Deployment: the wheel in an environment of torch, safetensors, archspec and the command's libraries, and no compiler."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from freezer.hardware.device_classes import PORTABLE
from tests.deploy.conftest import LEVEL, THREADS, resnet18

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(LEVEL is None, reason="needs a CPU of x86-64-v3 or better")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree."""
    dest = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(dest), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (built,) = dest.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def deployed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel and what it requires, and nothing else."""
    folder = tmp_path_factory.mktemp("deployed")
    venv.create(folder, with_pip=True)
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "-qq", "--no-compile", str(wheel)]
    command += ["-c", str(ROOT / "constraints.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def run(deployed: Path, home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A command of the deployment: nothing on the PATH, no cache, no home, no variable of ours."""
    environ = {"PATH": str(home / "nothing"), "HOME": str(home), "TORCHINDUCTOR_CACHE_DIR": str(home / "cache")}
    full = [str(deployed / command[0]), *command[1:]]
    return subprocess.run(full, env=environ, cwd=home, capture_output=True, text=True, timeout=120, check=False)


def test_the_wheel_holds_freezer_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"freezer"}


def test_the_environment_is_lean(deployed: Path, tmp_path: Path) -> None:
    listed = json.loads(run(deployed, tmp_path, "python", "-m", "pip", "list", "--format=json").stdout)
    names = {item["name"].lower() for item in listed}
    assert {"torch", "safetensors", "archspec", "coldpress"} <= names
    assert names.isdisjoint({"ray", "mlflow", "pyarrow", "transformers", "pandas", "psutil"})


@pytest.mark.parametrize(
    "command", [("classes",), ("inspect", "resnet18", "--store"), ("pull", "resnet18", "--dest", "here", "--store")]
)
def test_what_only_reads_computes_far_less_than_an_import_of_torch(
    deployed: Path, store: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """A sixth of it where this was written; how fast the machine is, and who else uses it, cancels out."""
    arguments = (*command, str(store)) if "--store" in command else command

    def seconds(*command: str) -> float:
        shutil.rmtree(tmp_path / "here", ignore_errors=True)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run(deployed, tmp_path, *command)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    taken = [(seconds("coldpress", *arguments), seconds("python", "-c", "import torch")) for _ in range(3)]
    ours, torchs = (min(column) for column in zip(*taken, strict=True))  # the first of each reads its files from the disk
    assert ours < torchs / 3, taken


def test_a_pulled_artifact_is_verified_and_runs_without_a_compiler(deployed: Path, store: Path, tmp_path: Path) -> None:
    pulled = run(deployed, tmp_path, "coldpress", "pull", "resnet18", "--store", str(store), "--dest", "pulled")
    assert pulled.returncode == 0, pulled.stderr
    assert f"resnet18:1 for {LEVEL} is in pulled" in pulled.stdout
    threads = ("--threads", str(THREADS))
    verified = run(deployed, tmp_path, "coldpress", "verify", "pulled/", *threads)
    assert verified.returncode == 0, verified.stderr
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(3))
    save_file({"pixel_values": x}, tmp_path / "in.safetensors")
    ran = run(
        deployed, tmp_path, "coldpress", "run", "pulled/", "--input", "in.safetensors", "--output", "out.safetensors", *threads
    )
    assert ran.returncode == 0, ran.stderr
    with torch.no_grad():
        expected = resnet18()(pixel_values=x).pooler_output
    drift = json.loads((tmp_path / "pulled" / "manifest.json").read_text())["drift"]
    difference = float((load_file(tmp_path / "out.safetensors")["pooler_output"] - expected).abs().max())
    assert difference <= 4 * drift["max_abs_err"] + 1e-6, "eager and frozen are each within the manifest's drift of the reference"
    assert not list((tmp_path / "cache").rglob("*")), "nothing was compiled"


OPEN = """
import resource, sys, torch
torch.set_num_threads(int(sys.argv[3]))
def spent():  # CPU time of this process and of what it started: others may use the machine meanwhile
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
started = spent()
import freezer
freezer.load
imported = spent()
model = freezer.load(sys.argv[1], store=sys.argv[2], device_class=sys.argv[4], canary=False)
opened = spent()
x = torch.randn(1, 3, 224, 224)
print(imported - started, opened - imported, model(x).pooler_output.shape, model.manifest.device_class)
freezer.load(sys.argv[1], store=sys.argv[2], device_class=sys.argv[4])  # with its canary
"""


@pytest.mark.parametrize(("name", "limit_s"), [(str(LEVEL), 0.5), (PORTABLE, 4.0)])
def test_a_payload_opens_quickly_with_an_empty_cache(
    deployed: Path, store: Path, tmp_path: Path, name: str, limit_s: float
) -> None:
    (tmp_path / "open.py").write_text(OPEN)
    figures = []
    for _ in range(3):
        done = run(deployed, tmp_path, "python", "open.py", "resnet18", str(store), str(THREADS), name)
        assert done.returncode == 0, done.stderr
        found = re.match(r"([\d.e-]+) ([\d.e-]+) torch.Size\(\[1, 512, 1, 1\]\) (\S+)", done.stdout)
        assert found, done.stdout
        assert found[3] == name
        figures.append((float(found[1]), float(found[2])))
    assert min(imported for imported, _ in figures) < 0.2, figures
    assert min(opened for _, opened in figures) < limit_s, figures
