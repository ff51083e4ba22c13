"""The catalog of everything that can go wrong: it is read without a problem, and each entry ends as
its tags say.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import examples.broken
from examples.prepare import prepare
from freezer.hardware import PORTABLE, best_level, detect
from freezer.store import WORK
from pipeline.catalog import read_catalog
from pipeline.ledger import read_rows
from pipeline.records import Outcome
from tests.support.campaign_runs import run
from tests.support.raylets import ROOT

BROKEN = Path(examples.broken.__file__).with_name("broken.yaml")


@pytest.fixture(scope="module")
def tags() -> dict[str, dict[str, str]]:
    """The tags of each entry."""
    prepare(catalogs=("broken",))
    catalog = read_catalog(BROKEN)
    assert catalog.problems == ()
    return {entry.name: dict(entry.tags) for entry in catalog.entries}


def test_every_entry_says_how_it_ends(tags: dict[str, dict[str, str]]) -> None:
    assert all("expect" in found for found in tags.values())


@pytest.mark.cluster
@pytest.mark.slow
def test_every_entry_ends_as_its_tags_say(tags: dict[str, dict[str, str]], tmp_path: Path) -> None:
    classes = (PORTABLE, str(best_level(detect().classes)))
    script = ROOT / "tests" / "support" / "drive.py"
    words = [script, BROKEN, tmp_path / "store", f"sqlite:///{tmp_path}/mlflow.db", "broken"]
    done = run([sys.executable, *map(str, words), str(tmp_path / "out.json"), *classes], tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = [row for row in read_rows(tmp_path / "store" / WORK / "ledger") if row.kind == "outcome"]
    found = [Outcome.from_json(row.data["outcome"]) for row in rows]
    assert {(outcome.model, outcome.device_class) for outcome in found} == {
        (name, at) for name in tags for at in classes
    }
    wrong = []
    for outcome in found:
        ending = (
            f"failed: {outcome.failure_kind}" if outcome.verdict == "failed" else outcome.verdict
        )
        reason = str(outcome.coded_reason)
        if ending not in _expected(tags[outcome.model], outcome.device_class):
            wrong.append(f"{outcome.model} {outcome.device_class}: got {ending}: {reason}")
    assert not wrong, "\n".join(wrong)


def _expected(tags: dict[str, str], device_class: str) -> tuple[str, ...]:
    if device_class == PORTABLE and "expect-portable" in tags:
        return tuple(tags["expect-portable"].split(" or "))
    endings = tuple(tags["expect"].split(" or "))
    # On a busy machine a verdict that depends on speed may be unstable.
    return (*endings, "unstable") if "kept-eager" in endings else endings
