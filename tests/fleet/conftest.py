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

from freezer.hardware import best_level, detect
from freezer.store import Store
from tests.fleet.arm import CPUS, HERE, VARIABLES, ArmMachine
from tests.support.commands import finished, output
from tests.support.fault_sites import Driver
from tests.support.heads import Head, started_head
from tests.support.raylets import DIES_WITH_US, ROOT, Raylet

OWN = str(best_level(detect().classes))
CLASSES = {OWN, *CPUS}
CAMPAIGN_S = 3600

MODELS = {
    "convolutions": {
        *("torchscript-frozen", "torchscript-optimized", "inductor-frozen", "onnxruntime"),
    },
    "attention": {"inductor-frozen"},
    "stream": {"torchscript-frozen"},
    "branches": {"torchscript-frozen", "torchscript-exact"},
}
"""The recipes that each class can have, by model; those of `attention` serve without torch."""

CATALOG = """
defaults: {threads: [1], limits: {speedup_min: 0.01, timeout_s: 1800}}
models:
  - name: convolutions
    source: python:fleet_models:convolutions
    inputs: [{shape: [1, 3, 16, 16]}]
    recipes: [torchscript-frozen, torchscript-optimized, inductor-frozen, onnxruntime]
  - name: attention
    source: python:fleet_models:Attention
    inputs: [{shape: [1, 16, 32]}]
    recipes: [inductor-frozen]
  - name: stream
    source: python:fleet_models:Stream
    inputs: [{shape: [1, 8]}]
    recipes: [torchscript-frozen]
    reset: reset
  - name: branches
    source: python:fleet_models:branches
    inputs: [{shape: [1, 16]}]
    recipes: [torchscript-frozen, torchscript-exact]
"""

SLOW = """
defaults: {threads: [1], limits: {speedup_min: 0.01}}
models:
  - name: slow
    source: python:fleet_models:slow
    args: {seconds: 10}
    inputs: [{shape: [1, 16]}]
    recipes: [torchscript-frozen]
"""


@dataclass(kw_only=True)
class Fleet:
    """The cluster: a head that is also a worker, and one worker of each Arm class."""

    folder: Path
    head: Head
    machines: Mapping[str, ArmMachine]
    workers: dict[str, Raylet] = field(default_factory=dict)

    @property
    def store(self) -> str:
        """The store, which all machines see."""
        return str(self.folder / "store")

    def start(self, *names: str) -> None:
        """Start the workers of some classes, one after the other: Ray gives each 30 s."""
        for name in names:
            self.workers[name] = self.machines[name].start_worker(self.head.gcs_address)

    def stop(self) -> None:
        """Stop the workers."""
        for worker in self.workers.values():
            worker.stop()

    def campaign(self, folder: Path, catalog: str, *options: str) -> subprocess.Popen[str]:
        """Start a campaign from this machine; its outcomes go to a file of the folder."""
        places = [f"--store={self.store}", f"--tracking-uri=sqlite:///{folder}/mlflow.db"]
        places += [f"--address={self.head.gcs_address}", f"--json={folder}/outcomes.json"]
        names = [f"--campaign={folder.name}", "--wait-for-nodes", "--accept-noise", "--verbose"]
        command = [sys.executable, "-u", "-m", "jobs.optimize", catalog, *places, *names, *options]
        return subprocess.Popen(
            [*DIES_WITH_US, *command],
            env={**self.head.environ, "PYTHONPATH": f"{ROOT}:{self.folder}"},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def served(self, runtime: str, *models: object) -> dict[str, Any]:
        """What serves some models on each machine, by its class."""
        words = ("-m", "tests.fleet.serve", self.store, runtime, *models)
        done = {OWN: finished(sys.executable, *words, env=self.head.environ)}
        done |= {name: machine.run("python", *words) for name, machine in self.machines.items()}
        for found in done.values():
            assert found.returncode == 0, found.stderr
        return {name: json.loads(found.stdout.splitlines()[-1]) for name, found in done.items()}


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The fleet, started with the commands of docs/guides/run-a-fleet.md and infra/images."""
    folder = tmp_path_factory.mktemp("fleet")
    shutil.copy(HERE / "fleet_models.py", folder)
    (folder / "catalog.yaml").write_text(CATALOG)
    Store.open(str(folder / "store"), create=True)
    machines = {name: ArmMachine(device_class=name, folder=folder) for name in CPUS}
    install = ("--no-deps", "--no-build-isolation", "--quiet", "--editable", ROOT)
    done = next(iter(machines.values())).run("pip", "install", *install)
    assert done.returncode == 0, done.stderr
    coldpress = Path(sys.executable).with_name("coldpress")
    labels = output(coldpress, "worker-labels").split()
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).chdir(folder)
        options = [*labels, "--num-cpus=1"]
        head = stack.enter_context(started_head(folder, VARIABLES, options=options))
        found = Fleet(folder=folder, head=head, machines=machines)
        stack.callback(found.stop)
        found.start(*CPUS)
        yield found


@pytest.fixture(scope="session")
def outcomes(fleet: Fleet) -> Mapping[tuple[str, str], Mapping[str, Any]]:
    """The outcomes of the campaign, by model and class."""
    driver = Driver(fleet.campaign(fleet.folder, "catalog.yaml"))
    exit_code = driver.end(CAMPAIGN_S)
    print(driver.output)
    found = json.loads((fleet.folder / "outcomes.json").read_text())["outcomes"]
    assert exit_code == 0, driver.output
    return {(item["model"], item["device_class"]): item for item in found}


@pytest.fixture(scope="session")
def answers(fleet: Fleet, outcomes: Mapping[tuple[str, str], Mapping[str, Any]]) -> dict[str, Any]:
    """What serves each model on each machine."""
    return fleet.served("torch", *MODELS)
