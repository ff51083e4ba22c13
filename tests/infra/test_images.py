"""Images of infra/images: pinned, unprivileged, complete; and the service really answers from its image."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "infra" / "images"
FILES = sorted(IMAGES.glob("*.Dockerfile"))
BUILT = (
    "coldpress-deployment",
    "coldpress-head",
    "coldpress-mlflow",
    "coldpress-serve",
    "coldpress-worker",
    "coldpress-worker-cuda",
)
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage of a Dockerfile.

    Attributes:
        instructions: pairs of an instruction and its arguments on one line; those of the stages it is based on come first.
    """

    name: str
    instructions: tuple[tuple[str, str], ...]

    def all(self, instruction: str) -> list[str]:
        """Arguments of all instructions of a kind."""
        return [arguments for name, arguments in self.instructions if name == instruction]


def stages(file: Path) -> dict[str, Stage]:
    """Stages of a Dockerfile by name."""
    lines = [line for line in file.read_text().splitlines() if line.strip() and not line.startswith("#")]
    found: dict[str, Stage] = {}
    name = ""
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        instruction, arguments = line.split(maxsplit=1)
        if instruction == "FROM":
            base, _, name = arguments.partition(" AS ")
            found[name] = Stage(name=name, instructions=found[base].instructions if base in found else (("FROM", base),))
        elif name:
            found[name] = Stage(name=name, instructions=(*found[name].instructions, (instruction, " ".join(arguments.split()))))
    return found


STAGES = {file.name.removesuffix(".Dockerfile"): stages(file) for file in FILES}


def commands(image: str) -> list[str]:
    """Arguments that build.sh gives to the builder."""
    environ = {**os.environ, "BUILDER": "echo"}
    done = subprocess.run([str(IMAGES / "build.sh"), image], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def target(image: str) -> Stage:
    """The stage that an image is built from."""
    words = commands(image)
    file = words[words.index("--file") + 1]
    return STAGES[Path(file).name.removesuffix(".Dockerfile")][words[words.index("--target") + 1]]


@pytest.mark.parametrize("image", BUILT)
def test_images_run_unprivileged_with_labels(image: str) -> None:
    """Kubernetes verifies runAsNonRoot only for numeric users."""
    stage = target(image)
    assert stage.all("USER")[-1] == "10001:10001"
    assert stage.all("HEALTHCHECK")
    assert stage.all("CMD")
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', " ".join(stage.all("LABEL"))))
    assert labels["title"] == image.removesuffix("-cuda")
    assert labels.keys() == {"title", "description", "version", "revision", "licenses"}
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"VERSION={version}" in stage.all("ARG"), "the version of a build without build.sh"


@pytest.mark.parametrize("file", STAGES)
def test_packages_are_pinned_by_the_constraints(file: str) -> None:
    installs = [run for stage in STAGES[file].values() for run in stage.all("RUN") if " install " in run and "apt-get" not in run]
    assert installs
    for run in installs:
        assert "--constraint constraints.txt" in run
        words = shlex.split(re.sub(r"\$\{TORCH_INDEX[^}]*\}", "", run.rpartition(" install ")[2].partition("&&")[0]))
        named = [re.sub(r"\[.*", "", word) for word in words if not word.startswith(("-", ".", "$")) and word != "constraints.txt"]
        assert set(named) - {"pipeline"} <= PINNED.keys(), run


@pytest.mark.parametrize("file", STAGES)
def test_copied_files_exist_in_the_context(file: str) -> None:
    included = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for stage in STAGES[file].values():
        for arguments in stage.all("COPY"):
            if arguments.startswith("--from="):
                continue
            for source in arguments.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert any(source == path or source.startswith(f"{path}/") for path in included), f"{source} is ignored"


def test_the_deployment_has_every_extra_by_default() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"EXTRAS={','.join(sorted(extras))}" in STAGES["deployment"]["build"].all("ARG")


def test_manifests_name_images_that_are_built() -> None:
    manifests = [path for path in (ROOT / "infra").rglob("*.y*ml") if "schemas" not in path.parts]
    named = {name for path in manifests for name in re.findall(r"image:\s*\S*?(coldpress-[a-z-]+)", path.read_text())}
    assert named <= set(BUILT)


def test_an_unknown_image_is_refused() -> None:
    done = subprocess.run([str(IMAGES / "build.sh"), "coldpress"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.startswith("no image 'coldpress'")) == (2, True)


def test_hadolint_accepts_the_dockerfiles() -> None:
    """DL3008 wants versions of Debian's packages, which a mirror keeps for days only."""
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([str(hadolint), "--ignore", "DL3008", *map(str, FILES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck (Debian: apt-get install shellcheck)")
def test_shellcheck_accepts_the_scripts() -> None:
    done = subprocess.run(["shellcheck", *map(str, IMAGES.glob("*.sh"))], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
