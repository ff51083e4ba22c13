"""`coldpress list`: what a store has published, in folders and buckets, and the completion of its
names.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freezer.artifact import Artifact
from freezer.store import Store
from tests.freezer.cli.conftest import Run
from tests.support.keys import make_pair
from tests.support.steps import blob_of, flip_a_byte, write_plain_artifact

V4 = "cpu-x86-64-v4"
LONG = "a-model-of-the-risk-team-with-a-long-name"


@pytest.fixture
def artifacts(tmp_path: Path) -> dict[str, Artifact]:
    """Artifacts of two classes, of 1 MB each."""
    return {
        name: write_plain_artifact(
            tmp_path / name, name[:1].encode() * 1_000_000, device_class=name
        )
        for name in (V4, "portable")
    }


def fill(uri: str, artifacts: dict[str, Artifact]) -> Store:
    """Publish `tiny` twice, where version 2 replaces only the portable artifact, and then a model
    with a long name.
    """
    store = Store.open(uri, create=True)
    store.publish("tiny", source_key="one", artifacts=list(artifacts.values()))
    portable = [artifacts["portable"]]
    store.publish("tiny", source_key="two", artifacts=portable, decided=["portable"])
    store.publish(LONG, source_key="one", artifacts=portable)
    return store


def test_versions_of_a_model(
    coldpress: Run, artifacts: dict[str, Artifact], tmp_path: Path
) -> None:
    store = fill(str(tmp_path / "store"), artifacts)
    store.sign(store.version("tiny:1"), V4, make_pair(tmp_path, "own")[0])
    code, out, _ = coldpress("list", "tiny", "--store", store.root, "--json")
    assert code == 0
    found = json.loads(out)["versions"]
    listed = []
    for version in found:
        artifacts_of = [(one["device_class"], one["signed"]) for one in version["artifacts"]]
        listed.append((version["version"], version["tags"], artifacts_of))
    assert listed == [
        (2, ["2", "latest"], [("portable", False)]),
        (1, ["1"], [(V4, True), ("portable", False)]),
    ]
    (portable,) = found[0]["artifacts"]
    assert portable["digest"] == store.version("tiny").images["portable"].digest
    assert 1_000_000 < portable["size_bytes"] < 1_010_000
    shown = coldpress("list", "tiny", "--store", store.root)[1].splitlines()
    assert shown[1].split()[:3] == ["tiny", "2", "latest"]
    assert coldpress("list", "none", "--store", store.root)[0] == 1


def test_a_damaged_model_hides_no_other(
    coldpress: Run, artifacts: dict[str, Artifact], tmp_path: Path
) -> None:
    store = fill(str(tmp_path / "store"), artifacts)
    flip_a_byte(blob_of(store.root / LONG, store.version(LONG).images["portable"].digest))
    code, out, err = coldpress("list", "--store", store.root)
    assert code == 1
    assert "tiny" in out
    assert "CP-INTEGRITY" in err
    assert LONG in err


def test_rollbacks_restore_whole_states(
    coldpress: Run, artifacts: dict[str, Artifact], tmp_path: Path
) -> None:
    store = fill(str(tmp_path / "store"), artifacts)
    whole, first = store.version("tiny"), store.version("tiny:1")
    undo = ("tiny", "--undo")
    for arguments, code, expected in (
        (undo, 2, whole),
        (("tiny:1",), 0, first),
        (("tiny:2",), 0, whole),
        (("tiny:1",), 0, first),
        (("tiny",), 2, first),
        (("tiny:2", "--undo"), 2, first),
        (undo, 0, whole),
        (undo, 2, whole),
    ):
        assert coldpress("rollback", *arguments, "--store", store.root)[0] == code, arguments
        assert store.version("tiny") == expected
