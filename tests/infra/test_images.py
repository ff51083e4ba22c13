"""Images of infra/images: pinned, unprivileged, complete; and the service really answers from its
image.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest
import requests
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from freezer.store import Store
from tests.conftest import Frozen
from tests.support.commands import output
from tests.support.manifests import PINNED, PROJECT
from tests.support.raylets import LOOPBACK, ROOT, free_port, wait_until
from tests.support.services import X, is_ready
from tests.support.steps import BATCH, artifact_of, quickly, random_inputs

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
OF_CUDA = ("cuda-", "nvidia-c", "nvidia-n", "triton")
"""Packages of a torch for CUDA, which pins them; not nvidia-ml-py."""


Stage = list[tuple[str, str]]
"""Pairs of an instruction of a Dockerfile and its arguments on one line; those of the stage it is
based on come first.
"""


def arguments(stage: Stage, instruction: str) -> list[str]:
    """Arguments of all instructions of a kind."""
    return [rest for name, rest in stage if name == instruction]


def stages(file: Path) -> dict[str, Stage]:
    """Stages of a Dockerfile by name."""
    lines = [line for line in file.read_text().splitlines() if line and line[0] != "#"]
    made: dict[str, Stage] = {}
    stage: Stage = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        instruction, rest = line.split(maxsplit=1)
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = made[name] = list(made.get(base, [("FROM", base)]))
        else:
            stage.append((instruction, " ".join(rest.split())))
    return made


STAGES = {file.name.removesuffix(".Dockerfile"): stages(file) for file in FILES}


def commands(image: str) -> list[str]:
    """Arguments that build.sh gives to the builder."""
    return shlex.split(output("env", "BUILDER=echo", IMAGES / "build.sh", image))


def target(image: str) -> Stage:
    """The stage that an image is built from."""
    words = commands(image)
    file = words[words.index("--file") + 1]
    return STAGES[Path(file).name.removesuffix(".Dockerfile")][words[words.index("--target") + 1]]


@pytest.mark.parametrize("image", BUILT)
def test_images_run_unprivileged_with_labels(image: str) -> None:
    """Kubernetes verifies runAsNonRoot only for numeric users."""
    stage = target(image)
    assert arguments(stage, "USER")[-1] == "10001:10001"
    assert arguments(stage, "HEALTHCHECK")
    assert arguments(stage, "CMD")
    labels = dict(
        re.findall(
            r'org\.opencontainers\.image\.(\w+)="([^"]*)"', " ".join(arguments(stage, "LABEL"))
        )
    )
    assert labels["title"] == image.removesuffix("-cuda")
    assert labels.keys() == {"title", "description", "version", "revision", "licenses"}
    version = PROJECT["project"]["version"]
    assert f"VERSION={version}" in arguments(stage, "ARG"), (
        "the version of a build without build.sh"
    )


def needed_by(requirement: Requirement) -> list[Requirement]:
    """The direct requirements here of a package with its extras."""
    name, needed = canonicalize_name(requirement.name), []
    for text in requires(name) or ():
        item = Requirement(text)
        extras = ["", *requirement.extras]
        wanted = item.marker is None or any(item.marker.evaluate({"extra": e}) for e in extras)
        if wanted and not (name == "torch" and item.name.startswith(OF_CUDA)):
            needed.append(item)
    return needed


def installed(requirements: list[str]) -> set[str]:
    """Packages that pip installs here for requirements, with those that these need in turn."""
    pending, seen = [Requirement(text) for text in requirements], set[str]()
    while pending:
        wanted = pending.pop()
        if str(wanted) not in seen:
            seen.add(str(wanted))
            pending += needed_by(wanted)
    return {canonicalize_name(Requirement(text).name) for text in seen}


@pytest.mark.parametrize("file", STAGES)
def test_packages_are_pinned_by_the_constraints(file: str) -> None:
    every = [run for stage in STAGES[file].values() for run in arguments(stage, "RUN")]
    runs = [run for run in every if " install " in run and "apt-get" not in run]
    assert runs
    for run in runs:
        assert "--constraint constraints.txt" in run
        command = run.rpartition(" install ")[2].partition("&&")[0]
        words = shlex.split(re.sub(r"\$\{TORCH_INDEX.*?\"\}", "", command))
        named = {word for word in words if not word.startswith(("-", ".", "$"))}
        assert installed(sorted(named - {"constraints.txt", "pipeline"})) <= PINNED.keys(), run


def test_the_environment_is_pinned() -> None:
    """All that `make setup` installs, so that images and CI of two days are the same."""
    project, groups = PROJECT["project"], PROJECT["dependency-groups"]
    named = [*project["dependencies"], *PROJECT["build-system"]["requires"], "pip"]
    named += [one for extra in project["optional-dependencies"].values() for one in extra]
    named += [one for group in ("pipeline", "serving", "dev") for one in groups[group]]
    assert installed(named) <= PINNED.keys()


@pytest.mark.parametrize("file", STAGES)
def test_copied_files_exist_in_the_context(file: str) -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    included = tuple(line[1:] for line in ignore if line.startswith("!"))
    copies = [rest for stage in STAGES[file].values() for rest in arguments(stage, "COPY")]
    for sources in (rest.split()[:-1] for rest in copies if not rest.startswith("--from=")):
        for source in sources:
            assert list(ROOT.glob(source)), source
            assert f"{source}/".startswith(tuple(f"{path}/" for path in included)), source


MISSING = [name for name in ("debootstrap", "podman", "runc") if shutil.which(name) is None]
COMPILERS = ("as", "c++", "cc", "clang", "g++", "gcc", "ld")

CONTAINERS = """
[containers]
# The usual limits may be above those of a test's machine.
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
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
    storage = f"""
[storage]
driver = "overlay"
graphroot = "{tmp_path}/images"
runroot = "{tmp_path}/run"
"""
    for name, text in (("CONTAINERS_STORAGE_CONF", storage), ("CONTAINERS_CONF", CONTAINERS)):
        (tmp_path / name).write_text(text)
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("BUILDER", "podman")
    selected = ("Created-By: Packages", "Codename: bookworm")
    mirrors = output("apt-get", "indextargets", "--format", "$(REPO_URI)", *selected).split()
    root, archive = tmp_path / "root", tmp_path / "base.tar"
    packages = "--include=ca-certificates,python-is-python3,python3-pip,python3-venv"
    output("debootstrap", "--variant=minbase", packages, "bookworm", root, *mirrors[:1])
    output("tar", "-C", root, "-cf", archive, ".")
    output("podman", "import", archive, "localhost/base")
    yield
    output("podman", "rm", "--all", "--force", "--time=0")
    shutil.rmtree(tmp_path)  # gigabytes


def pip_settings(folder: Path) -> list[str]:
    """Options of a build in which pip finds packages as it does here: a secret, and the local
    folders that it names.
    """
    listed = output(sys.executable, "-m", "pip", "config", "list")
    settings = dict(re.findall(r"^[\w:]+?[.:]+([a-z-]+)='(.*)'$", listed, re.MULTILINE))
    conf = folder / "pip.conf"
    lines = [f"{name} = {value}" for name, value in settings.items()]
    conf.write_text("\n".join(["[global]", *lines, ""]))
    paths = [Path(path) for path in re.findall(r"(?:file://|(?<=\s))(/[\w./-]+)", conf.read_text())]
    # With the files that an index refers to, beside it.
    folders = {Path(*path.parts[:3]) for path in paths if path.exists()}
    volumes = [f"--volume={path}:{path}:ro" for path in sorted(folders)]
    return [f"--secret=id=pip.conf,src={conf}", *volumes]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    bool(MISSING) or os.geteuid() != 0, reason=f"needs root and Debian's {', '.join(MISSING)}"
)
@pytest.mark.usefixtures("podman")
@pytest.mark.parametrize("extras", ["torch", "onnxruntime"])
def test_the_service_answers_from_its_image(
    portable: Frozen, store: Store, tmp_path: Path, extras: str
) -> None:
    """As in production: not root, nothing writable but /tmp, and no compiler in the image."""
    if extras != "torch":
        x, dims = random_inputs(2, 4), {"x": {0: BATCH}}
        made = quickly(portable.model, {"x": x}, tmp_path / "made", extras, dims=dims)
        store.publish("mlp", source_key="engine", artifacts=[artifact_of(made), portable.artifact])
    values = ("BASE=localhost/base", "TORCH_INDEX=", f"EXTRAS={extras}")
    build = [f"--build-arg={value}" for value in values]
    output(IMAGES / "build.sh", "coldpress-serve", *build, *pip_settings(tmp_path))
    if extras != "torch":
        size = output("podman", "image", "inspect", "--format", "{{.Size}}", "coldpress-serve")
        base = output("podman", "image", "inspect", "--format", "{{.Size}}", "localhost/base")
        assert int(size) - int(base) < 220e6, "with 130 MB of python:3.11-slim at most 350 MB"
    for path in (store.root, *store.root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    run = ["podman", "run", "--rm", "--no-healthcheck", "--read-only", "--tmpfs=/tmp:exec"]
    run.append(f"--volume={store.root}:/store:ro")
    script = f"""
id -u
command -v {" ".join(COMPILERS)}
touch /app/file /store/file 2>/dev/null || echo read-only
"""
    assert output(*run, "coldpress-serve", "sh", "-c", script).split() == ["10001", "read-only"]
    port = free_port()
    command = ["coldpress", "serve", "mlp", "--store=/store", f"--port={port}"]
    output(*run, "--detach", "--name=service", "coldpress-serve", *command)
    wait_until(lambda: is_ready(port), "the service is ready", 120)
    url = f"http://{LOOPBACK}:{port}/predict"
    answer = requests.post(url, json={"x": X.tolist()}, timeout=30)
    assert answer.status_code == 200, answer.text
    with torch.no_grad():
        expected = portable.model(X)
    torch.testing.assert_close(torch.tensor(answer.json()["output"]), expected)
