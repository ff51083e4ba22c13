"""A plan needs the files of its entries, and nodes with enough CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from freezer.errors import CatalogError, InfrastructureError
from freezer.freezing.sources import parse_source
from freezer.store import Store
from pipeline.catalog import Entry
from pipeline.ledger import Ledger
from pipeline.planning import Plan
from tests.support.campaigns import entry, good_entry, plan_of
from tests.support.steps import HERE


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


def planned(folder: Path, threads: Sequence[int], *, keep_going: bool = False) -> Plan:
    store = Store.open(str(folder / "store"), create=True)
    one = replace(good_entry(), threads=tuple(threads))
    with Ledger(store, "c") as ledger:
        return plan_of([one], store, ledger, keep_going=keep_going)


def test_portable_is_planned_for_one_count(tmp_path: Path) -> None:
    """By default the workers' two CPUs decide, and one follows."""
    for threads, expected in (((1, 2), (1, 2)), ((), (2, 1)), ((2,), (2,))):
        items = planned(tmp_path, threads).items
        found = {item.device_class: item.threads for item in items}
        assert found == {HERE: expected, "portable": (2,)}


def test_too_many_threads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="entry 'good': got threads 4") as caught:
        planned(tmp_path, (1, 4))
    assert caught.value.code == "CP-NO-NODE"
    plan = planned(tmp_path, (1, 4), keep_going=True)
    assert [item.device_class for item in plan.items] == ["portable"]
    (skipped,) = plan.skipped
    assert (skipped.device_class, skipped.code) == (HERE, "CP-NO-NODE")
