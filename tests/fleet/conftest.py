"""A fleet of this machine and three emulated Arm machines, and one campaign on it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from freezer.artifact import Artifact
from freezer.hardware import best_level, detect
from freezer.store import Store
from tests.cluster.conftest import MODELS as SLOW_MODELS
from tests.fleet.arm import ARM_ROOT, CPUS, HERE, VARIABLES, ArmMachine
from tests.support.campaign_runs import outcomes as outcomes_in
from tests.support.commands import Done, finished, output
from tests.support.fault_sites import Driver
from tests.support.heads import Head, started_head
from tests.support.raylets import DIES_WITH_US, ROOT, Raylet

OWN = str(best_level(detect().classes))
CLASSES = {OWN, *CPUS}
Outcomes = Mapping[tuple[str, str], Mapping[str, Any]]

ENTRIES = yaml.safe_load((HERE / "catalog.yaml").read_text())["models"]
RECIPES = {entry["name"]: set(entry["recipes"]) for entry in ENTRIES}


@dataclass(kw_only=True)
class Fleet:
    """The cluster: a head that is also a worker, and one worker of each Arm class.

    Attributes:
        folder: what all machines see, with the store.
    """

    folder: Path
    head: Head
    machines: Mapping[str, ArmMachine]
    workers: dict[str, Raylet] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        """The store of all campaigns."""
        return Store.open(str(self.folder / "store"))

    def start(self, *names: str) -> None:
        """Start the workers of some classes, one after the other: Ray gives each 30 s."""
        for name in names:
            self.workers[name] = self.machines[name].start_worker(self.head.gcs_address)

    def stop(self) -> None:
        """Stop the workers."""
        for worker in self.workers.values():
            worker.stop()

    def campaign(self, name: str, *options: str) -> Driver:
        """Start a campaign over NAME.yaml from this machine."""
        places = [f"--store={self.store.root}", f"--tracking-uri=sqlite:///{self.folder}/mlflow.db"]
        places += [f"--address={self.head.gcs_address}", f"--json={name}.json"]
        command = [sys.executable, "-u", "-m", "jobs.optimize", f"{name}.yaml", *places, *options]
        process = subprocess.Popen(
            [*DIES_WITH_US, *command, "--wait-for-nodes", "--accept-noise", "--verbose"],
            env=self.head.environ,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return Driver(process)

    def outcomes(self, name: str) -> Outcomes:
        """The outcomes of a campaign, by model and class."""
        return outcomes_in(self.folder, name)

    def run(self, name: str, command: str, *words: object) -> Done:
        """Run a command on the machine of a class to its end."""
        if name != OWN:
            return self.machines[name].run(command, *words)
        here = Path(sys.executable).with_name(command)
        return finished(here, *words, env=self.head.environ, cwd=self.folder)

    def served(self, runtime: str, *models: object) -> dict[str, Any]:
        """What serves some models on each machine, by its class."""
        words, found = ("-m", "tests.fleet.serve", self.store.root, runtime, *models), {}
        for name in CLASSES:
            done = self.run(name, "python", *words)
            assert done.returncode == 0, done.stderr
            found[name] = json.loads(done.stdout.splitlines()[-1])
        return found


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The fleet, started with the commands of docs/guides/run-a-fleet.md and infra/images."""
    folder = tmp_path_factory.mktemp("fleet")
    for path in (*HERE.glob("*.yaml"), HERE / "fleet_models.py", SLOW_MODELS):
        shutil.copy(path, folder)
    Store.open(str(folder / "store"), create=True)
    machines = {name: ArmMachine(device_class=name, folder=folder) for name in CPUS}
    install = ("--no-deps", "--no-build-isolation", "--quiet", "--editable", ROOT)
    done = next(iter(machines.values())).run("pip", "install", *install)
    assert done.returncode == 0, done.stderr
    coldpress = Path(sys.executable).with_name("coldpress")
    options = [*output(coldpress, "worker-labels").split(), "--num-cpus=1"]
    with ExitStack() as stack:
        head = stack.enter_context(started_head(folder, VARIABLES, options=options))
        found = Fleet(folder=folder, head=head, machines=machines)
        stack.callback(found.stop)
        found.start(*CPUS)
        yield found


@pytest.fixture(scope="session")
def outcomes(fleet: Fleet) -> Outcomes:
    """The outcomes of the campaign."""
    driver = fleet.campaign("catalog")
    exit_code = driver.end(3600)
    print(driver.output)
    assert exit_code == 0
    return fleet.outcomes("catalog")


@pytest.fixture(scope="session")
def answers(fleet: Fleet, outcomes: Outcomes) -> dict[str, Any]:
    """What serves each model on each machine."""
    return fleet.served("torch", *RECIPES)


@pytest.fixture(scope="session")
def artifacts(fleet: Fleet, outcomes: Outcomes) -> dict[str, Artifact]:
    """The artifacts of `attention`, which each machine pulled, by class."""
    folder, found = fleet.folder / "artifacts", {}
    for name in CLASSES:
        words = ("coldpress", "pull", "attention", "--store", fleet.store.root)
        done = fleet.run(name, *words, "--dest", folder / name)
        assert done.returncode == 0, done.stderr
        found[name] = Artifact.read(folder / name)
        assert found[name].manifest.device_class == name
    return found


@pytest.fixture(scope="session")
def program(fleet: Fleet) -> Path:
    """The program of examples/cpp for Arm, built on this machine."""
    folder = fleet.folder / "cpp"
    torch = next(Path(ARM_ROOT).glob("opt/venv/lib/python3*/site-packages/torch"))
    output(
        *("cmake", "-S", ROOT / "examples" / "cpp", "-B", folder),
        *("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"),
        *("-DCMAKE_CXX_COMPILER=/usr/bin/aarch64-linux-gnu-g++", f"-DCMAKE_SYSROOT={ARM_ROOT}"),
        f"-DCMAKE_PREFIX_PATH=/{(torch / 'share' / 'cmake').relative_to(ARM_ROOT)}",
    )
    output("cmake", "--build", folder)
    return folder / "coldpress-verify"
