"""A plan needs the files of its entries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from freezer.errors import CatalogError
from freezer.freezing.sources import parse_source
from freezer.store import Store
from pipeline.catalog import Entry
from pipeline.ledger import Ledger
from tests.support.campaigns import entry, plan_of


def of_files(folder: Path, name: str) -> Entry:
    """An entry with a file for a source, and one with samples."""
    made = entry(name, folder)
    (folder / f"{name}.pt2").write_bytes(b"0")
    (folder / f"{name}.npz").write_bytes(b"0")
    return replace(
        made,
        source=parse_source(f"export:{name}.pt2", folder=folder),
        samples=folder / f"{name}.npz",
    )


@pytest.mark.parametrize("suffix", ["pt2", "npz"])
def test_file_lost_before_planning_is_a_problem(tmp_path: Path, suffix: str) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    entries = [of_files(tmp_path, name) for name in ("first", "gone", "last")]
    (tmp_path / f"gone.{suffix}").unlink()
    message = rf"entry 'gone': .*gone\.{suffix}.*put the file back, and start again"
    with Ledger(store, "c") as ledger, pytest.raises(CatalogError, match=message) as caught:
        plan_of(entries, store, ledger)
    assert caught.value.code == "CP-FETCH"
