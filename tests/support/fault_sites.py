"""A site for faults: a Ray cluster of two unlike nodes, a campaign on it, and the checks at its
end.

driver = site.campaign_at("build a")  # start the nodes and a campaign; read up to these words
...                                    # inject the fault
site.check_recovery(driver)            # wait for the end, and check store, ledger and MLflow
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from freezer.hardware import PORTABLE
from freezer.store import Store
from pipeline.ledger import ledger_folder, read_rows
from tests.cluster.conftest import V3, V4, write_slow_catalog
from tests.support.raylets import ROOT, RayCluster
from tests.support.shown import shown

FAILING = Path(__file__).with_name("failing_disk.c")
GOOD = {"published", "kept-eager", "unstable"}
LINE_S = 180.0


class Driver:
    """The driver of a campaign: its process, and its output so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.output = process, ""

    def wait_for(self, words: str) -> None:
        """Read lines until one contains the words."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + LINE_S
        for line in self.process.stdout:
            self.output += line
            if words in line:
                return
            assert time.monotonic() < deadline, f"no {words!r} within {LINE_S:g} s:\n{self.output}"
        raise AssertionError(f"no {words!r}:\n{self.output}")

    def end(self, timeout_s: float = 400) -> int:
        """Wait for the end of the driver and return its exit code."""
        try:
            self.output += self.process.communicate(timeout=timeout_s)[0]
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(
                f"still runs after {timeout_s:g} s:\n{self.output + self.process.communicate()[0]}"
            ) from None
        return self.process.returncode

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.process.kill()
        self.end(60)

    def close(self) -> None:
        """Kill the process if it still runs, and close its output."""
        with self.process:
            self.process.kill()

    @property
    def built(self) -> Counter[str]:
        """`model class recipe` of each build that was reported as done, and how often."""
        lines = (line.split() for line in self.output.splitlines())
        return Counter(
            " ".join(words[2:5])
            for words in lines
            if words[1:2] == ["built"] and "failed" not in words
        )


@dataclass
class Site:
    """A cluster and one campaign.

    Attributes:
        folder: the catalog, the store and the MLflow database.
        names: the models, a letter each; set before the first driver starts.
        server_uri: of an MLflow server, if the scenario starts one.
        struck_at: monotonic time of the fault.
        recovery_s: seconds from the fault to the end of the campaign.
        num_verified: artifacts that were pulled and verified at the end.
        went_on: how the campaign came to its end, for the table.
        num_versions: the allowed numbers of versions of each model.
    """

    folder: Path
    cluster: RayCluster
    names: str = "a"
    server_uri: str | None = None
    drivers: list[Driver] = field(default_factory=list)
    struck_at: float = 0.0
    recovery_s: float = 0.0
    num_verified: int = 0
    went_on: str = "by itself"
    num_versions: tuple[int, ...] = (1,)

    @property
    def store(self) -> Path:
        """The store of the campaign."""
        return self.folder / "store"

    @property
    def tracking_uri(self) -> str:
        """The MLflow database, or the server of the scenario."""
        return self.server_uri or f"sqlite:///{self.folder}/mlflow.db"

    def start_nodes(
        self, *, head: Mapping[str, str] | None = None, node: Mapping[str, str] | None = None
    ) -> None:
        """Start a head for v4 and a node for v3, each with extra environment variables, unless they
        run already.
        """
        if not self.cluster.raylets:
            self.cluster.start(num_cpus=1, classes=[V4], environ=head)
            self.add_node(node)

    def add_node(self, environ: Mapping[str, str] | None = None) -> None:
        """Start one more node for v3."""
        self.cluster.start(num_cpus=1, classes=[V3], environ=environ)

    def drive(
        self, *options: str, campaign: str = "faults", environ: Mapping[str, str] | None = None
    ) -> Driver:
        """Start a driver of a campaign."""
        catalog = self.folder / "catalog.yaml"
        if not catalog.exists():
            write_slow_catalog(self.folder, self.names, seconds=2.0)
        words = (
            ROOT / "tests" / "support" / "watched.py",
            catalog,
            self.store,
            self.tracking_uri,
            campaign,
            *options,
        )
        self.drivers.append(
            Driver(self.cluster.popen([sys.executable, "-u", *map(str, words)], environ))
        )
        return self.drivers[-1]

    def campaign_at(self, words: str) -> Driver:
        """Start the nodes and a driver, and read its output up to the words; the fault strikes
        then.
        """
        self.start_nodes()
        driver = self.drive()
        driver.wait_for(words)
        self.strike()
        return driver

    def strike(self) -> None:
        """Start to time the recovery."""
        self.struck_at = time.monotonic()

    def check_recovery(self, driver: Driver, *, again: Driver | None = None) -> None:
        """Wait for the end of the campaign and check everything.

        Args:
            driver: the driver that the fault struck.
            again: the driver that continued, if `driver` ended.
        """
        last = again or driver
        assert last.end() == 0, last.output
        if again is not None:
            self.went_on = "started again"
            repeated = set(again.built) & set(driver.built)
            assert not repeated, f"built again: {repeated}\n{driver.output}\n----\n{again.output}"
        self.check_all()

    def check_all(self) -> None:
        """Stop timing the recovery; check the outcomes, the store, leftovers and MLflow."""
        self.recovery_s = time.monotonic() - self.struck_at
        self.check_outcomes()
        self.check_store()
        self.check_nothing_left()
        self.check_mlflow()

    @property
    def expected(self) -> set[tuple[str, str]]:
        """The planned models and classes."""
        return {(name, device_class) for name in self.names for device_class in (V4, V3, PORTABLE)}

    @property
    def verdicts(self) -> dict[tuple[str, str], str]:
        """Verdicts in the last driver's report, by model and class."""
        report = json.loads((self.folder / "store.json").read_text())
        return {
            (item["model"], item["device_class"]): item["verdict"] for item in report["outcomes"]
        }

    def check_outcomes(self) -> None:
        """The report and the ledger contain each planned outcome, under one key."""
        assert set(self.verdicts) == self.expected
        assert set(self.verdicts.values()) <= GOOD, self.verdicts
        rows = [
            row
            for row in read_rows(ledger_folder(Store.open(str(self.store))))
            if row.kind == "outcome"
        ]
        assert {(row.model, row.device_class) for row in rows} == self.expected
        assert len({row.key for row in rows}) == len(self.expected), (
            "something was planned with two keys"
        )

    def check_store(self) -> None:
        """The newest version of each model contains every published class, verified; no unfinished
        file is left.
        """
        store = Store.open(str(self.store))
        self.num_verified = 0
        for name in self.names:
            versions = store.versions(name)
            assert len(versions) in self.num_versions, name
            assert versions == list(range(1, len(versions) + 1)), name
            version = store.version(name)
            published = {
                at
                for (model, at), verdict in self.verdicts.items()
                if (model, verdict) == (name, "published")
            }
            assert set(version.images) >= {PORTABLE, *published}
            for device_class in version.images:
                out = self.folder / "pulled" / name / device_class
                shutil.rmtree(out, ignore_errors=True)
                store.pull(version, device_class, out).verify()
                self.num_verified += 1
        assert [*self.store.rglob("*.partial"), *self.store.rglob(".*.tmp")] == []

    def check_nothing_left(self) -> None:
        """No staging folder, lease, unpublished result or stray process is left."""
        left = [
            path
            for pattern in ("staging/*", "judged/*", "ledger/lease-*")
            for path in (self.store / ".coldpress").glob(pattern)
        ]
        assert left == []
        assert self.cluster.left() == {}

    def check_mlflow(self) -> None:
        """MLflow shows each candidate once, finished, and the alias of every portable artifact."""
        found = shown(self.tracking_uri)
        tags = [(run["data"]["tags"], run["info"]["status"]) for run in found["runs"].values()]
        ours = [
            (tag["coldpress.model"], tag["coldpress.device_class"], status)
            for tag, status in tags
            if (tag.get("coldpress.kind"), tag.get("coldpress.campaign")) == ("candidate", "faults")
        ]
        assert sorted(ours) == sorted((*planned, "FINISHED") for planned in self.expected)
        for name in self.names:
            assert PORTABLE in found["aliases"][name]


def failing_disk(folder: Path, failing: Path) -> dict[str, str]:
    """Compile failing_disk.c; return the environment in which `failing` fails while the file
    `folder / "failing"` exists.
    """
    library = folder / "failing_disk.so"
    subprocess.run(
        ["cc", "-O2", "-fPIC", "-shared", "-o", str(library), str(FAILING), "-ldl"], check=True
    )
    return {
        "LD_PRELOAD": str(library),
        "FAILING_FOLDER": str(failing),
        "FAILING_WHILE": str(folder / "failing"),
    }
