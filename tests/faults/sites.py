"""A site for faults: a real cluster of unlike raylets, a campaign on it, and what must hold when all is over.

    site.head(); site.node()            raylets
    driver = site.drive()               a campaign, quick sampling, every task watched
    driver.until("build a")             its lines, as it says them
    ...                                 the fault
    site.recovered(driver)              the end of the campaign, and what must hold then

What must hold: the campaign ended well, every planned outcome is there once, every version of the store is whole and verified, what
was built before the fault is not built again, nothing of it is left behind, and MLflow shows each outcome once.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freezer.hardware.device_classes import PORTABLE
from freezer.store.store import Store
from pipeline.ledger.ledger import ledger_folder
from pipeline.ledger.segments import read_rows
from tests.cluster.conftest import V3, V4
from tests.pipeline.shown import shown
from tests.raylets import RayCluster, Raylet

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests" / "pipeline" / "models" / "campaign_models.py"
FAILING = Path(__file__).with_name("failing_disk.c")
GOOD = ("published", "kept-eager", "unstable")
LINE_S = 180.0


class Driver:
    """A campaign's driver: its process, and what it has said so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.said, self.started = process, "", time.monotonic()

    def until(self, words: str, timeout_s: float = LINE_S) -> None:
        """Read lines until one holds the words."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        for line in self.process.stdout:
            self.said += line
            if words in line:
                return
            assert time.monotonic() < deadline, f"{words!r} was not said within {timeout_s:g} s:\n{self.said}"
        raise AssertionError(f"{words!r} was not said:\n{self.said}")

    def end(self, timeout_s: float = 400) -> int:
        """Its exit code."""
        try:
            rest, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.said += self.process.communicate()[0]
            raise AssertionError(f"did not end within {timeout_s:g} s:\n{self.said}") from None
        self.said += rest
        return self.process.returncode

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End it at once."""
        self.process.send_signal(how)
        self.end(60)

    def end_now(self) -> None:
        """Leave nothing of it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        if self.process.stdout is not None:
            self.process.stdout.close()

    @property
    def built(self) -> Counter[str]:
        """`model class recipe` of each build that it says was done, and how often."""
        lines = (line.split() for line in self.said.splitlines())
        return Counter(" ".join(words[2:5]) for words in lines if words[1:2] == ["built"] and "failed:" not in words)


@dataclass
class Site:
    """See above.

    Attributes:
        folder: of everything.
        names: of the models, a letter each; to be set before the first driver starts.
        seconds: that each takes to load, so that faults strike in mid-build.
        classes: of the entries, besides portable.
        server_uri: of an MLflow server, where the scenario has one.
        stands: whether head and node are there already, and stay.
        struck_at: when the fault began, by the monotonic clock.
        recovery_s: from then to the end of the campaign.
        num_found: outcomes that are in the ledger at the end.
        num_verified: artifacts that the store shows at the end, each of which was pulled and verified.
        went_on: how the campaign came to its end.
        num_versions: of each model: how many the campaign may make in all.
    """

    folder: Path
    cluster: RayCluster
    names: str = "a"
    seconds: float = 2.0
    classes: tuple[str, ...] = (V4, V3)
    campaign: str = "faults"
    server_uri: str | None = None
    stands: bool = False
    drivers: list[Driver] = field(default_factory=list)
    struck_at: float = 0.0
    recovery_s: float = 0.0
    num_found: int = 0
    num_verified: int = 0
    went_on: str = "by itself"
    num_versions: tuple[int, ...] = (1,)

    @property
    def store(self) -> Path:
        """Where it publishes."""
        return self.folder / "store"

    @property
    def tracking_uri(self) -> str:
        """Of its MLflow: a database, or the scenario's server."""
        return self.server_uri or f"sqlite:///{self.folder}/mlflow.db"

    def write_catalog(self) -> None:
        """A catalog of small models that are slow to load."""
        shutil.copy(MODELS, self.folder)
        entries = "\n".join(
            f'  - {{name: {name}, source: "python:campaign_models:slow_to_build", '
            f"args: {{width: {8 + place}, seconds: {self.seconds}}}, inputs: [{{shape: [1, {8 + place}]}}]}}"
            for place, name in enumerate(self.names)
        )
        defaults = f"defaults: {{recipes: [torchscript-frozen], device_classes: [{', '.join(self.classes)}]}}"
        (self.folder / "catalog.yaml").write_text(f"{defaults}\nmodels:\n{entries}\n")

    def head(self, *classes: str, num_cpus: int = 1, **more: Any) -> Raylet:
        """The head."""
        if self.stands:
            return self.cluster.raylets[0]
        return self.cluster.start(num_cpus=num_cpus, classes=classes or (V4,), **more)

    def node(self, *classes: str, num_cpus: int = 1, **more: Any) -> Raylet:
        """A further node."""
        if self.stands:
            return self.cluster.raylets[1]
        return self.cluster.start(num_cpus=num_cpus, classes=classes or (V3,), **more)

    def drive(
        self,
        *options: str,
        campaign: str | None = None,
        environ: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> Driver:
        """Start a driver of the campaign, or of another."""
        if not (self.folder / "catalog.yaml").exists():
            self.write_catalog()
        script = ROOT / "tests" / "cluster" / "watched.py"
        words = (script, self.folder / "catalog.yaml", self.store, self.tracking_uri, campaign or self.campaign)
        command = [*before, sys.executable, "-u", *(str(word) for word in words), *options]
        driver = Driver(self.cluster.popen(command, environ))
        self.drivers.append(driver)
        return driver

    def strikes(self) -> None:
        """From now on recovery is timed."""
        self.struck_at = time.monotonic()

    def recovered(self, driver: Driver, *, exit_code: int = 0, again: Driver | None = None) -> None:
        """Wait for the end of the campaign, and hold it to what must hold.

        Args:
            driver: that was struck.
            exit_code: of the last driver.
            again: that went on after `driver` had ended; none where `driver` itself survived.
        """
        last = again or driver
        assert last.end() == exit_code, last.said
        self.recovery_s = time.monotonic() - self.struck_at
        if again is not None:
            self.went_on = "started again"
            repeated = {what for what in again.built if what in driver.built}
            assert not repeated, f"built again: {repeated}\n{driver.said}\n----\n{again.said}"
        self.check_whole()

    def check_whole(self) -> None:
        """Everything is there once, and whole."""
        self.check_outcomes()
        self.check_store()
        self.check_nothing_left()
        self.check_mlflow()

    @property
    def expected(self) -> set[tuple[str, str]]:
        """Models and classes."""
        return {(name, device_class) for name in self.names for device_class in (*self.classes, PORTABLE)}

    def check_outcomes(self) -> None:
        """Each planned outcome is in the ledger and in the report of the last driver."""
        report = json.loads((self.folder / "store.json").read_text())
        found = {(item["model"], item["device_class"]): item["verdict"] for item in report["outcomes"]}
        assert set(found) == self.expected
        assert set(found.values()) <= set(GOOD), found
        rows = [row for row in read_rows(ledger_folder(Store.open(str(self.store)))) if row.kind == "outcome"]
        assert {(row.model, row.device_class) for row in rows} == self.expected
        assert len({row.key for row in rows}) == len(self.expected), "one key each: nothing was planned differently"
        self.num_found = len({row.key for row in rows})

    def check_store(self) -> None:
        """The newest version of each model holds every class that was published, verified; nothing unfinished lies about."""
        store = Store.open(str(self.store))
        self.num_verified = 0
        for name in self.names:
            versions = store.versions(name)
            assert len(versions) in self.num_versions, name
            assert versions == list(range(1, len(versions) + 1)), name
            version = store.version(name)
            assert set(version.images) >= {PORTABLE, *self.published_for(name)}
            for device_class in version.images:
                out = self.folder / "pulled" / name / device_class
                shutil.rmtree(out, ignore_errors=True)
                store.pull(version, device_class, out).verify()
                self.num_verified += 1
        unfinished = [*self.store.rglob("*.partial"), *self.store.rglob(".*.tmp")]
        assert unfinished == []

    def published_for(self, name: str) -> set[str]:
        """The classes that the last report says a model was published for."""
        outcomes = json.loads((self.folder / "store.json").read_text())["outcomes"]
        return {item["device_class"] for item in outcomes if item["model"] == name and item["verdict"] == "published"}

    def check_nothing_left(self) -> None:
        """Nothing staged, no lease, nothing judged and unpublished; no process of an item, nor of a worker that is gone."""
        work = self.store / ".coldpress"
        for name in ("staging", "judged"):
            assert not (work / name).exists() or list((work / name).iterdir()) == [], name
        assert list(work.glob("ledger/lease-*")) == []
        left = self.cluster.left()
        assert left == {}, left

    def check_mlflow(self) -> None:
        """MLflow shows each candidate once, finished, and every published class by its alias."""
        found = shown(self.tracking_uri)
        runs = [run for run in found["runs"].values() if run["data"]["tags"].get("coldpress.kind") == "candidate"]
        ours = [run for run in runs if run["data"]["tags"]["coldpress.campaign"] == self.campaign]
        named = Counter((run["data"]["tags"]["coldpress.model"], run["data"]["tags"]["coldpress.device_class"]) for run in ours)
        assert named == Counter(dict.fromkeys(self.expected, 1))
        assert {run["info"]["status"] for run in ours} == {"FINISHED"}
        for name in self.names:
            assert PORTABLE in found["aliases"][name]


def failing_disk(folder: Path, failing: Path) -> dict[str, str]:
    """The environment of a disk where a folder fails, see failing_disk.c: while the file `failing` of the other is there."""
    library = folder / "failing_disk.so"
    subprocess.run(["cc", "-O2", "-fPIC", "-shared", "-o", str(library), str(FAILING), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "FAILING_FOLDER": str(failing), "FAILING_WHILE": str(folder / "failing")}


def wait_until(holds: Callable[[], object], what: str, timeout_s: float = 60) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.1)
