"""Whole campaigns on a real local Ray: outcomes, reuse, interrupts and reports."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import freezer
from freezer.hardware import PORTABLE, best_level, detect
from freezer.store import Store
from pipeline.cluster import PACKAGES
from pipeline.ledger import CampaignRecord, Ledger
from pipeline.workspace import staging_folder
from tests.support.campaign_runs import (
    CATALOG,
    ONE_MODEL,
    drive,
    outcomes,
    run,
    write_catalog,
)
from tests.support.commands import Done

pytestmark = pytest.mark.cluster

LEVEL = best_level(detect().classes)


RETRAINED = """
defaults: {{recipes: [auto], threads: [1], limits: {{speedup_min: 0.01}}}}
models:
  - name: again
    source: python:campaign_models:retrained
    args: {{seed: {seed}, folder: "{folder}"}}
    inputs: {{x: {{shape: [2, 16]}}}}
"""

Finished = tuple[Path, Done]


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A finished campaign of a good and three bad models, beside packages of the user's that have
    the names of Coldpress's.
    """
    folder = tmp_path_factory.mktemp("campaign")
    write_catalog(folder, CATALOG)
    for package in PACKAGES:
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text("raise RuntimeError('of the user')")
    return folder, run(drive(folder), folder)


def test_failures_are_outcomes_while_other_models_finish(campaign: Finished) -> None:
    folder, done = campaign
    assert done.returncode == 1, done.stdout + done.stderr
    found = outcomes(folder)
    assert set(found) == {
        ("good", str(LEVEL)),
        *((name, PORTABLE) for name in ("good", "drifting", "raises", "hangs")),
    }
    assert found["good", PORTABLE]["verdict"] == "published"
    assert found["good", str(LEVEL)]["verdict"] in ("published", "kept-eager")
    expected = {
        "drifting": "CP-WEIGHTS-DIFFER: ",
        "raises": "CP-SOURCE: .* ValueError: no weights at hand",
        "hangs": "CP-TIMEOUT: ",
    }
    for model, reason in expected.items():
        outcome = found[model, PORTABLE]
        assert (outcome["verdict"], outcome["artifact"]) == ("failed", None), model
        assert re.match(reason, outcome["reason"]), model


def test_campaign_leaves_no_files_or_processes(campaign: Finished) -> None:
    folder, _ = campaign
    work = folder / "store" / ".coldpress"
    assert list((work / "staging").iterdir()) == []
    assert not (work / "judged").exists() or list((work / "judged").iterdir()) == []
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(folder) in " ".join(command)]


def test_store_serves_the_published_model(
    campaign: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = campaign
    model = freezer.load("good", store=str(folder / "store"), threads=len(os.sched_getaffinity(0)))
    monkeypatch.syspath_prepend(str(folder))
    from campaign_models import good  # type: ignore[import-not-found]

    x = torch.randn(5, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(x), good().eval()(x))


@pytest.mark.slow
def test_ray_starts_only_for_work(tmp_path: Path) -> None:
    write_catalog(tmp_path, ONE_MODEL)

    def starts_ray() -> bool:
        done = run([*drive(tmp_path), PORTABLE], tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return "starting Ray" in done.stdout

    assert starts_ray()
    assert not starts_ray()
    store = Store.open(str(tmp_path / "store"))
    payload = store.manifest(store.version("good"), PORTABLE).payloads[0]
    store.file(store.version("good"), payload).unlink()
    assert starts_ray()
    assert store.file(store.version("good"), payload).is_file()


def optimize(folder: Path, *arguments: str) -> Done:
    store = [] if "--store" in arguments else ["--store", str(folder / "store")]
    paths = [*store, "--tracking-uri", f"sqlite:///{folder}/mlflow.db"]
    command = [sys.executable, "-m", "jobs.optimize", "catalog.yaml", *paths, *arguments]
    report = [] if "--explain" in command else ["--json", str(folder / "out.json")]
    return run([*command, *report], folder)


BAD_ENTRY = '  - {name: Bad, source: "python:campaign_models:good"}\n'


def test_bad_entries_and_options_are_refused_before_any_work(tmp_path: Path) -> None:
    write_catalog(tmp_path, ONE_MODEL + BAD_ENTRY)
    bad = optimize(tmp_path)
    assert bad.returncode == 2
    assert "CP-ENTRY: catalog.yaml:" in bad.stderr
    assert not (tmp_path / "store").exists()
    assert optimize(tmp_path, "--keep-going", "--address", "127.0.0.1:9").returncode == 3


def test_explain_writes_nothing_beside_a_running_driver(tmp_path: Path) -> None:
    write_catalog(tmp_path, ONE_MODEL + BAD_ENTRY)
    store = Store.open(str(tmp_path / "store"), create=True)

    def contents() -> dict[str, bytes]:
        """The files of the store, but those that show that the driver is alive."""
        files = [path for path in store.root.rglob("*") if path.is_file()]
        return {str(path): path.read_bytes() for path in files if path.suffix != ".json"}

    with staging_folder(store.root) as mine:
        killed = mine.with_name(mine.name.replace(f"~{os.getpid()}~", "~999999999~"))
        killed.mkdir()
        with Ledger(store, "catalog") as ledger:  # this process is the driver
            record = CampaignRecord(catalog="catalog.yaml", started=1.0, members=())
            ledger.append("campaign", "catalog", model="", device_class="", data=record.to_json())
            (ledger.folder / ".catalog@half.partial").touch()
            before = contents()
            explained = optimize(tmp_path, "--keep-going", "--explain")
            assert explained.returncode == 0, explained.stdout + explained.stderr
            assert f"good {LEVEL}: build torchscript-frozen; judge (never done)" in explained.stdout
            assert "Bad auto: nothing (CP-ENTRY: " in explained.stdout
            ledger.check()  # this process still holds the lease
            assert contents() == before
        assert {path.name for path in mine.parent.iterdir()} == {mine.name, killed.name}
    assert not (tmp_path / "mlflow.db").exists()


def reached(folder: Path, seed: int) -> tuple[Done, dict[str, Any]]:
    """A campaign over a model with these weights, and its outcome for this machine's class."""
    write_catalog(folder, RETRAINED.format(seed=seed, folder=folder))
    done = run(drive(folder), folder)
    return done, outcomes(folder)["again", str(LEVEL)]


@pytest.mark.slow
@pytest.mark.skipif(LEVEL is None, reason="needs a CPU of x86-64-v3 or better")
def test_retrained_model_inherits_its_speed(tmp_path: Path) -> None:
    """On a machine too busy to time anything, without building what lost before."""
    done, outcome = reached(tmp_path, 0)
    assert outcome["verdict"] == "published"
    assert re.search(rf"judged again {PORTABLE}: published .*; waits for", done.stdout)
    (tmp_path / "busy").touch()
    done, outcome = reached(tmp_path, 1)
    assert (done.returncode, outcome["verdict"], outcome["version"]) == (0, "published", 2), outcome
    assert outcome["clock"] == "inherited"
    assert re.search(rf"again {LEVEL} \S+: skipped", done.stdout)
    store = Store.open(str(tmp_path / "store"))
    latest = store.version("again")
    manifests = [store.manifest(latest, name) for name in latest.images]
    assert {manifest.device_class for manifest in manifests} == {LEVEL, PORTABLE}
    assert all(manifest.latency and manifest.latency.cold_start for manifest in manifests)
    assert len({manifest.provenance["weights"] for manifest in manifests}) == 1
