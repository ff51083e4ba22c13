"""Images of infra/images: pinned, unprivileged, complete; and the service really answers from its
image.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path

import pytest
import requests
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from freezer.store import Store
from tests.conftest import Frozen
from tests.support.raylets import ROOT, free_port, wait_until
from tests.support.steps import random_inputs

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
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINES = (ROOT / "constraints.txt").read_text().splitlines()
PINNED: dict[str, str] = {
    canonicalize_name(name): version
    for name, _, version in (line.partition("==") for line in LINES if line[:1] != "#")
}
OF_CUDA = (
    "cuda-",
    "nvidia-c",
    "nvidia-n",
    "triton",
)  # of a torch for CUDA, which pins them; not nvidia-ml-py


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage of a Dockerfile.

    Attributes:
        instructions: pairs of an instruction and its arguments on one line; those of the stages it
            is based on come first.
    """

    name: str
    instructions: tuple[tuple[str, str], ...]

    def all(self, instruction: str) -> list[str]:
        """Arguments of all instructions of a kind."""
        return [arguments for name, arguments in self.instructions if name == instruction]


def stages(file: Path) -> dict[str, Stage]:
    """Stages of a Dockerfile by name."""
    lines = [
        line for line in file.read_text().splitlines() if line.strip() and not line.startswith("#")
    ]
    found: dict[str, Stage] = {}
    name = ""
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        instruction, arguments = line.split(maxsplit=1)
        if instruction == "FROM":
            base, _, name = arguments.partition(" AS ")
            found[name] = Stage(
                name=name,
                instructions=found[base].instructions if base in found else (("FROM", base),),
            )
        elif name:
            found[name] = Stage(
                name=name,
                instructions=(
                    *found[name].instructions,
                    (instruction, " ".join(arguments.split())),
                ),
            )
    return found


STAGES = {file.name.removesuffix(".Dockerfile"): stages(file) for file in FILES}


def commands(image: str) -> list[str]:
    """Arguments that build.sh gives to the builder."""
    environ = {**os.environ, "BUILDER": "echo"}
    done = subprocess.run(
        [str(IMAGES / "build.sh"), image], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def tags(image: str) -> list[str]:
    words = commands(image)
    return sorted(words[place + 1] for place, word in enumerate(words) if word == "--tag")


def test_other_builds_leave_other_tags_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tags("coldpress-worker") == ["coldpress-worker", "coldpress-worker:0.1.0"]
    monkeypatch.setenv("VARIANT", "arm64")
    assert tags("coldpress-worker") == ["coldpress-worker:0.1.0-arm64"]
    monkeypatch.setenv("TORCH", "2.99.0")
    assert tags("coldpress-worker") == ["coldpress-worker:0.1.0-torch2.99.0-arm64"]
    monkeypatch.delenv("VARIANT")
    assert tags("coldpress-worker") == ["coldpress-worker:0.1.0-torch2.99.0"]
    assert "TORCH=2.99.0" in commands("coldpress-worker")
    for file in ("campaign", "deployment"):
        assert "TORCH=" in STAGES[file]["build"].all("ARG")


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
    labels = dict(
        re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', " ".join(stage.all("LABEL")))
    )
    assert labels["title"] == image.removesuffix("-cuda")
    assert labels.keys() == {"title", "description", "version", "revision", "licenses"}
    version = PROJECT["project"]["version"]
    assert f"VERSION={version}" in stage.all("ARG"), "the version of a build without build.sh"


def installed(requirements: list[str]) -> set[str]:
    """Packages that pip installs here for requirements, with those that these need in turn."""
    pending, found = [Requirement(one) for one in requirements], set[tuple[str, str]]()
    while pending:
        wanted = pending.pop()
        name = canonicalize_name(wanted.name)
        for extra in {"", *wanted.extras} - {known for other, known in found if other == name}:
            found.add((name, extra))
            needed = [Requirement(one) for one in requires(name) or ()]
            here = [
                one for one in needed if one.marker is None or one.marker.evaluate({"extra": extra})
            ]
            pending += [one for one in here if name != "torch" or not one.name.startswith(OF_CUDA)]
    return {name for name, _ in found}


@pytest.mark.parametrize("file", STAGES)
def test_packages_are_pinned_by_the_constraints(file: str) -> None:
    runs = [
        run
        for stage in STAGES[file].values()
        for run in stage.all("RUN")
        if " install " in run and "apt-get" not in run
    ]
    assert runs
    for run in runs:
        assert "--constraint constraints.txt" in run
        words = shlex.split(
            re.sub(r"\$\{TORCH_INDEX.*?\"\}", "", run.rpartition(" install ")[2].partition("&&")[0])
        )
        named = {word for word in words if not word.startswith(("-", ".", "$"))} - {
            "constraints.txt",
            "pipeline",
        }
        assert installed(sorted(named)) <= PINNED.keys(), run


def test_the_environment_is_pinned() -> None:
    """All that `make setup` installs, so that images and CI of two days are the same."""
    project, groups = PROJECT["project"], PROJECT["dependency-groups"]
    named = [*project["dependencies"], *PROJECT["build-system"]["requires"], "pip"]
    named += [one for extra in project["optional-dependencies"].values() for one in extra]
    named += [one for group in ("pipeline", "serving", "dev") for one in groups[group]]
    assert installed(named) <= PINNED.keys()


@pytest.mark.parametrize("file", STAGES)
def test_copied_files_exist_in_the_context(file: str) -> None:
    included = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    for stage in STAGES[file].values():
        for arguments in stage.all("COPY"):
            if arguments.startswith("--from="):
                continue
            for source in arguments.split()[:-1]:
                assert list(ROOT.glob(source)), source
                assert any(source == path or source.startswith(f"{path}/") for path in included), (
                    f"{source} is ignored"
                )


def test_the_deployment_has_every_extra_by_default() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert f"EXTRAS={','.join(sorted(extras))}" in STAGES["deployment"]["build"].all("ARG")


def test_manifests_name_images_that_are_built() -> None:
    manifests = [path for path in (ROOT / "infra").rglob("*.y*ml") if "schemas" not in path.parts]
    named = {
        name
        for path in manifests
        for name in re.findall(r"image:\s*\S*?(coldpress-[a-z-]+)", path.read_text())
    }
    assert named <= set(BUILT)


def test_an_unknown_image_is_refused() -> None:
    done = subprocess.run(
        [str(IMAGES / "build.sh"), "coldpress"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.startswith("no image 'coldpress'")) == (2, True)


def test_hadolint_accepts_the_dockerfiles() -> None:
    """DL3008 wants versions of Debian's packages, which a mirror keeps for days only."""
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [str(hadolint), "--ignore", "DL3008", *map(str, FILES)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(
    shutil.which("shellcheck") is None,
    reason="needs shellcheck (Debian: apt-get install shellcheck)",
)
def test_shellcheck_accepts_the_scripts() -> None:
    done = subprocess.run(
        ["shellcheck", *map(str, IMAGES.glob("*.sh"))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


MISSING = [name for name in ("debootstrap", "podman", "runc") if shutil.which(name) is None]
COMPILERS = ("as", "c++", "cc", "clang", "g++", "gcc", "ld")

CONTAINERS = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]  # the usual limits may be above those of a test's machine
netns = "host"
[engine]
runtime = "runc"  # crun of Debian 12 refuses hybrid control groups
cgroup_manager = "cgroupfs"
"""


@pytest.fixture
def podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Podman with a storage of its own, and an image `base` of Debian's packages: a test cannot
    rely on a registry.
    """
    settings = (
        f'[storage]\ndriver = "overlay"\ngraphroot = "{tmp_path}/images"\nrunroot ='
        f' "{tmp_path}/run"\n'
    )
    for name, text in (("CONTAINERS_STORAGE_CONF", settings), ("CONTAINERS_CONF", CONTAINERS)):
        (tmp_path / name).write_text(text)
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("BUILDER", "podman")
    mirrors = output(
        "apt-get",
        "indextargets",
        "--format",
        "$(REPO_URI)",
        "Created-By: Packages",
        "Codename: bookworm",
    ).split()
    packages = "ca-certificates,python-is-python3,python3-pip,python3-venv"
    output(
        "debootstrap",
        "--variant=minbase",
        f"--include={packages}",
        "bookworm",
        str(tmp_path / "root"),
        *mirrors[:1],
    )
    output("tar", "-C", str(tmp_path / "root"), "-cf", str(tmp_path / "base.tar"), ".")
    output("podman", "import", str(tmp_path / "base.tar"), "localhost/base")
    yield
    output("podman", "rm", "--all", "--force", "--time=0")
    shutil.rmtree(tmp_path)  # gigabytes


def output(*command: str) -> str:
    """Run a command, which must succeed, and return its output."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def pip_settings(folder: Path) -> list[str]:
    """Options of a build in which pip finds packages as it does here: a secret, and the local
    folders that it names.
    """
    listed = re.findall(
        r"^[\w:]+?[.:]+([a-z-]+)='(.*)'$",
        output(sys.executable, "-m", "pip", "config", "list"),
        re.MULTILINE,
    )
    conf = folder / "pip.conf"
    conf.write_text(
        "[global]\n" + "".join(f"{name} = {value}\n" for name, value in dict(listed).items())
    )
    paths = [Path(path) for path in re.findall(r"(?:file://|(?<=\s))(/[\w./-]+)", conf.read_text())]
    folders = {
        Path(*path.parts[:3]) for path in paths if path.exists()
    }  # with what an index refers to, beside it
    return [
        f"--secret=id=pip.conf,src={conf}",
        *(f"--volume={path}:{path}:ro" for path in sorted(folders)),
    ]


def is_ready(address: str) -> bool:
    """Whether a service has loaded its model."""
    try:
        return requests.get(f"http://{address}/ready", timeout=5).ok
    except requests.ConnectionError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    bool(MISSING) or os.geteuid() != 0, reason=f"needs root and Debian's {', '.join(MISSING)}"
)
@pytest.mark.usefixtures("podman")
def test_the_service_answers_from_its_image(portable: Frozen, store: Store, tmp_path: Path) -> None:
    """As in production: not root, nothing writable but /tmp, and no compiler in the image."""
    arguments = ["BASE=localhost/base", "TORCH_INDEX=", "EXTRAS="]
    output(
        str(IMAGES / "build.sh"),
        "coldpress-serve",
        *(f"--build-arg={item}" for item in arguments),
        *pip_settings(tmp_path),
    )
    for folder in (store.root, *store.root.rglob("*")):
        folder.chmod(0o755 if folder.is_dir() else 0o644)
    run = [
        "podman",
        "run",
        "--rm",
        "--no-healthcheck",
        "--read-only",
        "--tmpfs=/tmp:exec",
        f"--volume={store.root}:/store:ro",
    ]
    script = (
        f"id -u; command -v {' '.join(COMPILERS)}; touch /app/file /store/file 2>/dev/null || echo"
        " read-only"
    )
    assert output(*run, "coldpress-serve", "sh", "-c", script).split() == ["10001", "read-only"]
    address = f"127.0.0.1:{free_port()}"
    command = [
        "python",
        "-m",
        "infra.serving.service",
        "mlp",
        "--store=/store",
        f"--port={address.rpartition(':')[2]}",
    ]
    output(*run, "--detach", "--name=service", "coldpress-serve", *command)
    wait_until(lambda: is_ready(address), "the service is ready", 120)
    x = random_inputs(2, 4)
    answer = requests.post(f"http://{address}/predict", json={"x": x.tolist()}, timeout=30)
    assert answer.status_code == 200, answer.text
    (found,) = answer.json().values()
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(found), portable.model(x))
