"""The catalog of what can go wrong: it is read without a complaint, and each entry ends as its tags say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import examples.broken
from examples.broken_files import BROKEN_FILES
from examples.models import DATA
from examples.prepare import prepare
from freezer.hardware.device_classes import PORTABLE, best_level
from freezer.hardware.machine import detect
from freezer.store.store import WORK
from pipeline.catalog.catalog import read_catalog
from pipeline.ledger.segments import read_rows
from pipeline.records.outcome import Outcome

ROOT = Path(__file__).parents[2]
BROKEN = Path(examples.broken.__file__).with_name("broken.yaml")

LEVEL = best_level(detect().classes)

REASONS = {
    "routes-to-experts": ("broken.py:62", "self.experts[chosen](x)"),
    "turns-nan": ("only NaN or Inf",),
    "trains-only": ("RuntimeError: this model can only be trained",),
    "writes-its-input": ("CP-INPUT-WRITTEN", "'x'"),
    "names": ("forward returned no tensor",),
    "other-weights": ("the source gave other weights",),
    "wrong-name": ("'pixels' is no parameter of forward(x)",),
    "raises": ("FileNotFoundError: weights-of-last-week.bin is not there",),
    "hangs": ("did not end within 20 s",),
    "leaves": ("left with exit code 7",),
    "segfaults": ("died of SIGSEGV",),
    "eats-memory": ("used more than 1.5 GB",),
    "talks": ("printed more than 67 MB",),
    "names-a-gpu": ("cuda:0",),
    "cut-short": ("cut-short.jit",),
}
"""What the reason of an outcome must hold."""


@pytest.fixture(scope="session")
def tags() -> dict[str, dict[str, str]]:
    """The tags of each entry, as the file has them."""
    prepare(catalogs=("broken",))
    return {record["name"]: record["tags"] for record in yaml.safe_load(BROKEN.read_text())["models"]}


def test_the_catalog_is_read_without_a_complaint(tags: dict[str, dict[str, str]]) -> None:
    catalog = read_catalog(BROKEN)
    assert catalog.problems == ()
    assert {entry.name: dict(entry.tags) for entry in catalog.entries} == tags
    assert all("expect" in found for found in tags.values())


def test_prepare_makes_each_file_once(tags: dict[str, dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    paths = prepare(catalogs=("broken",))
    assert {DATA / name for name in BROKEN_FILES} <= set(paths)
    assert all(line.endswith(": up to date") for line in capsys.readouterr().out.splitlines())


@pytest.mark.cluster
@pytest.mark.slow
def test_every_entry_ends_as_its_tags_say(tags: dict[str, dict[str, str]], tmp_path: Path) -> None:
    classes = (PORTABLE, str(LEVEL))
    done = _run(tmp_path, classes)
    assert done.returncode == 1, done.stdout + done.stderr
    found = _outcomes(tmp_path / "store")
    assert set(found) == {(name, device_class) for name in tags for device_class in classes}
    wrong = [
        f"{outcome.model} {outcome.device_class}: got {_ending(outcome)}: {outcome.coded_reason}"
        for outcome in found.values()
        if _ending(outcome) not in _expected(tags[outcome.model], outcome.device_class)
    ]
    reasons = {outcome.model: str(outcome.coded_reason) for outcome in found.values()}
    wrong += [f"{name}: no {part!r} in {reasons[name]}" for name in REASONS for part in REASONS[name] if part not in reasons[name]]
    assert not wrong, "\n".join(wrong)


def _run(folder: Path, classes: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """A campaign with quick sampling; a home of its own, since a local Ray writes a token into it."""
    script = ROOT / "tests" / "pipeline" / "drive.py"
    paths = [BROKEN, folder / "store", f"sqlite:///{folder}/mlflow.db", "broken", folder / "out.json", *classes]
    environment = {**os.environ, "HOME": str(folder), "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), *(str(path) for path in paths)]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=500, check=False)


def _outcomes(store: Path) -> dict[tuple[str, str], Outcome]:
    """All outcomes of a store, with the types of their failures, which only the ledger has."""
    rows = read_rows(store / WORK / "ledger")
    found = [Outcome.from_json(row.data["outcome"]) for row in rows if row.kind == "outcome"]
    return {(outcome.model, outcome.device_class): outcome for outcome in found}


def _ending(outcome: Outcome) -> str:
    return f"failed: {outcome.failure_kind}" if outcome.verdict == "failed" else outcome.verdict


def _expected(tags: dict[str, str], device_class: str) -> tuple[str, ...]:
    if device_class == PORTABLE and "expect-portable" in tags:
        return tuple(tags["expect-portable"].split(" or "))
    endings = tuple(tags["expect"].split(" or "))
    # Where speed decides, a machine that does other things meanwhile may not be able to tell.
    return (*endings, "unstable") if "kept-eager" in endings else endings
