"""A campaign over retrained models whose driver, and workers, are killed at random moments."""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from freezer.hardware import PORTABLE, best_level, detect
from freezer.store import WORK, Store
from pipeline.ledger import ledger_folder, read_rows
from pipeline.workspace import log_place
from tests.support.campaign_runs import drive, environment, outcomes, run, write_catalog

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

LEVEL = best_level(detect().classes)

NUM_KILLS = 10

CATALOG = "defaults: {recipes: [auto], threads: [1], limits: {speedup_min: 0.01}}\nmodels:\n"
MODEL = """
  - name: NAME
    source: python:campaign_models:retrained
    args: {seed: SEED, folder: "FOLDER"}
    inputs: {x: {shape: [2, 16]}}
"""


def train(folder: Path, night: int) -> None:
    """Write the catalog of two models with the weights of a night."""
    models = ""
    for number, name in enumerate(("a", "b")):
        model = MODEL.replace("NAME", name).replace("FOLDER", str(folder))
        models += model.replace("SEED", str(10 * night + number))
    write_catalog(folder, CATALOG + models)


def kill(driver: subprocess.Popen[bytes], *, and_workers: bool) -> None:
    """Kill a driver, and at the same moment the tree of each worker."""
    killed = [psutil.Process(driver.pid)]
    if and_workers:
        for process in killed[0].children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[0].startswith(("ray::build", "ray::judge")):
                    killed += [process, *process.children(recursive=True)]
    for process in killed:
        with contextlib.suppress(psutil.Error):
            process.kill()
    driver.wait()


def is_stopped(process: psutil.Process, home: Path) -> bool:
    """Whether a process of the campaign is stopped."""
    with contextlib.suppress(psutil.Error):
        return process.status() == "stopped" and process.environ().get("HOME") == str(home)
    return False


def finished(store: Path) -> dict[str, int]:
    """When each candidate and each judgement that the store contains was made, by key."""
    made: dict[str, int] = {}
    for folder in (store / WORK).glob("candidates/*"):
        with contextlib.suppress(OSError):
            made[folder.name] = (folder / "candidate.json").stat().st_mtime_ns
    for folder in (store / WORK).glob("judged/*"):
        key = folder.name.partition("-")[0]
        with contextlib.suppress(OSError):
            made[f"judge {key}"] = Path(log_place(str(store), key)).stat().st_mtime_ns
    return made


def repeated(store: Path, before: dict[str, int]) -> list[str]:
    """What was finished, and was made again since."""
    now = finished(store)
    for name in before:
        if name.startswith("judge "):  # its artifact may be published since, its log stays
            log = Path(log_place(str(store), name.removeprefix("judge ")))
            now[name] = log.stat().st_mtime_ns
    return [name for name in before if now.get(name, before[name]) != before[name]]


@pytest.mark.skipif(LEVEL is None, reason="needs a CPU of x86-64-v3 or better")
@pytest.mark.parametrize("seed", [0])
def test_kills_lose_and_repeat_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Without a compiler, whose builds would take most of the time."""
    monkeypatch.setenv("CXX", "missing")
    chance, store = random.Random(seed), tmp_path / "store"
    train(tmp_path, 0)
    assert run(drive(tmp_path, "night-0"), tmp_path).returncode == 0
    contest = outcomes(tmp_path)
    train(tmp_path, 1)
    started = time.monotonic()
    assert run(drive(tmp_path, "night-1"), tmp_path).returncode == 0
    whole_s = time.monotonic() - started
    check(tmp_path, 1, contest)
    night, num_kills = 2, 0
    train(tmp_path, night)
    while num_kills < NUM_KILLS:
        before = finished(store)
        log = tmp_path / f"log-{num_kills}"
        with log.open("ab") as file:
            driver = subprocess.Popen(
                drive(tmp_path, f"night-{night}"),
                env=environment(tmp_path),
                cwd=tmp_path,
                stdout=file,
                stderr=file,
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert driver.wait(chance.uniform(0, whole_s)) == 0, log.read_text()
            check(tmp_path, night, contest)
            night += 1
            train(tmp_path, night)
        if driver.returncode is None:
            kill(driver, and_workers=chance.random() < 0.5)
            num_kills += 1
            print(num_kills, log.read_text().splitlines()[-1:])
            time.sleep(3)  # until the cluster of the killed driver has ended
        assert repeated(store, before) == []
    assert run(drive(tmp_path, f"night-{night}"), tmp_path).returncode == 0
    check(tmp_path, night, contest)
    rows = Counter(
        (row.kind, row.key, row.model)
        for row in read_rows(ledger_folder(Store.open(str(store))))
        if row.kind in ("build", "outcome")
    )
    assert [row for row, count in rows.items() if count > 1] == []
    assert [process for process in psutil.process_iter() if is_stopped(process, tmp_path)] == []


def check(folder: Path, night: int, contest: dict[tuple[str, str], dict[str, Any]]) -> None:
    """A night's outcomes: each once, with the speed of the contest, in one version a model."""
    found = outcomes(folder)
    assert found.keys() == contest.keys() == {(n, c) for n in "ab" for c in (LEVEL, PORTABLE)}
    store = Store.open(str(folder / "store"))
    for place, outcome in found.items():
        assert (outcome["verdict"], outcome["version"]) == ("published", night + 1), outcome
        if place[1] != PORTABLE:
            assert outcome["clock"] == "inherited", outcome
            assert outcome["speedup"] == contest[place]["speedup"]
            assert outcome["recipe"] == contest[place]["recipe"]
        assert store.version(place[0]).number == night + 1
