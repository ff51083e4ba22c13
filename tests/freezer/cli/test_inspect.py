"""Records of a freeze: in the manifest, in the evidence, and in `coldpress inspect`."""

from __future__ import annotations

from pathlib import Path

from freezer.store import Store
from tests.conftest import Frozen
from tests.freezer.cli.conftest import Run
from tests.support.steps import (
    HERE,
    copy_of,
    flip_a_byte,
    write_plain_artifact,
)

TEXTS = ["all-captured-code.txt", "all-captured-graph.txt", "all-code.txt", "all-graph.txt"]


def test_inspect_prints_code(coldpress: Run, store: Store, tmp_path: Path) -> None:
    pulled = store.pull(store.version("mlp"), HERE, tmp_path / "pulled")
    assert sorted(path.name for path in (pulled.folder / "evidence").glob("*.txt")) == TEXTS
    for arguments in ((pulled.folder,), ("mlp", "--store", store.root)):
        code, out, _ = coldpress("inspect", *arguments, "--code")
        assert (code, out) == (0, (pulled.folder / "evidence/all-code.txt").read_text())


def test_inspect_reports_missing_and_damaged_texts(
    coldpress: Run, tmp_path: Path, scripted: Frozen
) -> None:
    code, _, err = coldpress("inspect", write_plain_artifact(tmp_path / "old").folder, "--code")
    assert code == 1
    assert "tiny for portable contains no evidence/all-code.txt; earlier releases" in err
    damaged = copy_of(scripted.artifact, tmp_path / "damaged")
    flip_a_byte(damaged.folder / "evidence/all-code.txt")
    code, _, err = coldpress("inspect", damaged.folder, "--code")
    assert (code, "it was changed or damaged" in err) == (1, True)
