"""The ledger is durable, has one writer for each campaign, and stays readable if the writer is
killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freezer.errors import StoreUnreachableError
from freezer.store import Store
from pipeline.ledger import Draft, Ledger
from pipeline.ledger.ledger import MERGE_AT
from pipeline.ledger.segments import part_paths, read_folder
from tests.support.steps import python


def add(ledger: Ledger, key: str, **data: object) -> None:
    ledger.append("build", key, model="m", device_class="portable", data=data)


def test_rows_are_read_by_the_next_driver(store: Store) -> None:
    with Ledger(store, "one") as ledger:
        add(ledger, "k1", n=1)
        add(ledger, "k1", n=2)
        ledger.append("outcome", "k1", model="m", device_class="portable", data={"text": "é\n"})
    with Ledger(store, "two") as ledger:
        row = ledger.find("build", "k1")
        assert row is not None
        assert (row.data, row.campaign) == ({"n": 2}, "one")
        outcome = ledger.find("outcome", "k1")
        assert outcome is not None
        assert outcome.data == {"text": "é\n"}
        assert ledger.find("build", "k2") is None
        nearest = ledger.nearest("outcome", "m", "portable")
        assert nearest is not None
        assert nearest.key == "k1"
        assert ledger.nearest("outcome", "m", "cpu-x86-64-v4") is None


def test_parts_are_merged(store: Store) -> None:
    with Ledger(store, "big") as ledger:
        for index in range(MERGE_AT + 3):
            add(ledger, f"k{index}", index=index)
        assert len(part_paths(ledger.folder)) == 4, "they are merged while the campaign runs"
    assert len(part_paths(ledger.folder)) == 1
    with Ledger(store, "big") as ledger:
        rows = [ledger.find("build", f"k{i}") for i in range(MERGE_AT + 3)]
        assert [row and row.data["index"] for row in rows] == list(range(MERGE_AT + 3))


WRITER = """
import sys
from freezer.store.artifact_store import Store
from pipeline.ledger.ledger import Ledger
with Ledger(Store.open(sys.argv[1]), "killed") as ledger:
    for index in range(100000):
        data = {"index": index}
        ledger.append("build", f"k{index}", model="m", device_class="portable", data=data)
        print(index, flush=True)
"""


def test_killed_writer_loses_no_finished_row(store: Store) -> None:
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(store.root)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            written = -1
            for line in process.stdout:
                written = int(line)
                if written >= 20:
                    os.kill(process.pid, signal.SIGKILL)
                    break
            rest = process.stdout.read().splitlines()
            written = int(rest[-1]) if rest else written
        with Ledger(store, "killed") as ledger:
            assert all(
                ledger.find("build", f"k{index}") is not None for index in range(written + 1)
            )


def test_parts_of_earlier_releases_are_read(store: Store) -> None:
    with Ledger(store, "old") as ledger:
        pass
    for index in range(3):
        columns = {
            "kind": "build",
            "key": f"k{index}",
            "model": "m",
            "device_class": "c",
            "campaign": "old",
            "time": float(index),
        }
        table = pa.table(
            {
                **{name: [value] for name, value in columns.items()},
                "data": [json.dumps({"index": index})],
            }
        )
        pq.write_table(table, ledger.folder / f"old@{index}-1-{index}.parquet")
    with Ledger(store, "old") as again:
        assert [again.find("build", f"k{i}").data["index"] for i in range(3)] == [0, 1, 2]  # type: ignore[union-attr]
    assert [path.suffix for path in part_paths(ledger.folder)] == [".arrow"]
    with Ledger(store, "new") as later:
        assert later.find("build", "k2") is not None


def test_clock_that_goes_back_keeps_the_order(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for now in (2e9, 1e9):
        monkeypatch.setattr("time.time", lambda now=now: now)
        with Ledger(store, "one") as ledger:
            add(ledger, "k", now=now)
    with Ledger(store, "two") as ledger:
        add(ledger, "k", now=0.0)
        found = ledger.find("build", "k")
    assert found is not None
    assert found.data == {"now": 0.0}
    with Ledger(store, "three") as ledger:
        again = ledger.find("build", "k")
    assert again is not None
    assert (again.data, again.time) == (found.data, found.time)


def test_rows_are_added_atomically(store: Store) -> None:
    with Ledger(store, "one") as ledger:
        ledger.append_all(
            [
                Draft(kind="outcome", key=f"k{i}", model="m", device_class="portable", data={})
                for i in range(100)
            ]
        )
        (part,) = part_paths(ledger.folder)
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 1
        part.write_bytes(content)
    with (
        pytest.raises(StoreUnreachableError, match=f"{part.name}.*its bytes differ"),
        Ledger(store, "one"),
    ):
        pass


def test_reader_finds_rows_that_are_merged_meanwhile(store: Store) -> None:
    with Ledger(store, "one") as ledger:
        for index in range(3):
            add(ledger, f"k{index}")
        reading = read_folder(ledger.folder)
        seen = {row.key for row in next(reading).rows}
    assert len(part_paths(ledger.folder)) == 1
    assert seen | {row.key for part in reading for row in part.rows} == {"k0", "k1", "k2"}


def test_full_disk_adds_no_row(store: Store) -> None:
    script = """
import resource, signal, sys
from freezer.errors import StoreUnreachableError
from freezer.store.artifact_store import Store
from pipeline.ledger.ledger import Ledger
with Ledger(Store.open(sys.argv[1]), "full") as ledger:
    ledger.append("build", "small", model="m", device_class="portable", data={})
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    try:
        data = {"text": __import__("os").urandom(20000).hex()}
        ledger.append("build", "large", model="m", device_class="portable", data=data)
    except StoreUnreachableError as error:
        print("refused", error)
"""
    assert python(script, store.root).startswith("refused the ledger")
    with Ledger(store, "full") as ledger:
        assert ledger.find("build", "small") is not None
        assert ledger.find("build", "large") is None
    assert not list(ledger.folder.glob(".*partial"))


def test_models_that_share_a_key_have_their_own_rows(store: Store) -> None:
    with Ledger(store, "test") as ledger:
        for model in ("one", "other"):
            ledger.append(
                "outcome", "shared", model=model, device_class="portable", data={"of": model}
            )
    with Ledger(store, "later") as again:
        rows = [again.find("outcome", "shared", model=model) for model in ("one", "other")]
        assert [row and row.data["of"] for row in rows] == ["one", "other"]
        assert again.find("outcome", "shared", model="third") is None
