"""A campaign has one driver, on one machine or on several; one that lost its lease writes nothing
more.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from freezer.errors import InfrastructureError, UsageError
from freezer.store import Store
from pipeline.ledger import (
    Holder,
    LeaseLostError,
    Ledger,
    campaign_lock,
    lease,
    ledger_folder,
    living_holder,
    read_holder,
    read_rows,
)
from pipeline.ledger.lease import lease_path
from pipeline.ledger.segments import part_paths


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), create=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(lease, "EXPIRY_S", 1.5)
    monkeypatch.setattr(lease, "POLL_S", 0.05)


def holder_here(store: Store) -> Holder:
    with campaign_lock(store, "c"):
        found = read_holder(store, "c")
    assert found is not None
    return found


def leave(store: Store, **changed: Any) -> Path:
    """Write the lease of another driver."""
    path = store.root / lease_path("c")
    path.write_text(json.dumps(asdict(replace(holder_here(store), token="another", **changed))))
    return path


def test_successor_knows_the_first_dead_driver(store: Store) -> None:
    leave(store, pid=os.getpid(), pid_started=1, started=5.0)
    with campaign_lock(store, "c") as second:
        assert second.after == 5.0
        held = read_holder(store, "c")
    assert held is not None
    assert (held.after, held.unended_since) == (5.0, 5.0)
    leave(store, pid=os.getpid(), pid_started=1, started=7.0, after=5.0)
    with campaign_lock(store, "c") as third:
        assert third.after == 5.0
    with campaign_lock(store, "c") as fourth:
        assert fourth.after is None


def test_lease_of_an_earlier_release_is_read(store: Store) -> None:
    path = leave(store, started=5.0)
    data = json.loads(path.read_text())
    del data["after"]
    path.write_text(json.dumps(data))
    found = read_holder(store, "c")
    assert found is not None
    assert found.unended_since == 5.0
    del data["token"]
    path.write_text(json.dumps(data))
    assert read_holder(store, "c") is None


ELSEWHERE = {"boot": "another boot", "host": "far", "beat_time": 4e9, "started": 4e9}
"""A holder on another machine, whose clock is decades ahead."""


def test_dead_local_driver_is_replaced_at_once(store: Store) -> None:
    """Its pid may belong to another process by now."""
    leave(store, pid=os.getpid(), pid_started=1, expiry_s=1000.0)
    started = time.monotonic()
    with campaign_lock(store, "c"):
        assert time.monotonic() - started < 1


def test_heartbeat_of_another_machine_keeps_the_lease(store: Store) -> None:
    path = leave(store, **ELSEWHERE, expiry_s=60.0)
    ended = threading.Event()

    def beat() -> None:
        found = read_holder(store, "c")
        while not ended.wait(0.2) and found is not None:
            found = replace(found, beat=found.beat + 1)
            path.with_suffix(".new").write_text(json.dumps(asdict(found)))
            path.with_suffix(".new").replace(path)

    thread = threading.Thread(target=beat)
    thread.start()
    said: list[str] = []
    try:
        with (
            pytest.raises(
                InfrastructureError,
                match=(
                    r"run by another driver.*on far since .*; wait for it.*to take over, end that"
                ),
            ),
            campaign_lock(store, "c", said.append),
        ):
            pass
    finally:
        ended.set()
        thread.join()
    assert "watching up to 60 s for a heartbeat of process" in said[0]


def test_silent_remote_driver_is_replaced_after_expiry(store: Store) -> None:
    leave(store, **ELSEWHERE, expiry_s=0.5)
    started = time.monotonic()
    with campaign_lock(store, "c"):
        assert time.monotonic() - started >= 0.5


def test_driver_that_lost_its_lease_writes_nothing(store: Store) -> None:
    """It slept longer than its expiry, and a driver on another machine took over."""
    with Ledger(store, "c") as ledger:
        ledger.append("build", "k1", model="m", device_class="portable", data={})
        mine = read_holder(store, "c")
        assert mine is not None
        (store.root / lease_path("c")).write_text(
            json.dumps(asdict(replace(mine, token="another", host="far")))
        )
        before = part_paths(ledger_folder(store))
        with pytest.raises(LeaseLostError):
            ledger.append("build", "k2", model="m", device_class="portable", data={})
        time.sleep(0.3)  # its heartbeats have stopped
        assert read_holder(store, "c") == replace(mine, token="another", host="far")
    assert part_paths(ledger_folder(store)) == before
    assert [row.key for row in read_rows(ledger_folder(store))] == ["k1"]
    assert read_holder(store, "c") is not None, "only the holder removes it"


DRIVER = """
import sys, time
from freezer.store.artifact_store import Store
from pipeline.ledger import lease
from pipeline.ledger.ledger import Ledger
lease.HEARTBEAT_S, lease.EXPIRY_S = 0.1, 1.5
with Ledger(Store.open(sys.argv[1]), "c") as ledger:
    print("driving", flush=True)
    time.sleep(60)
"""


def test_killed_driver_is_replaced_but_not_a_stopped_one(store: Store) -> None:
    command = [sys.executable, "-c", DRIVER, str(store.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "driving\n"
        process.send_signal(signal.SIGSTOP)
        with (
            pytest.raises(InfrastructureError, match=rf"process {process.pid} of"),
            campaign_lock(store, "c"),
        ):
            pass
        process.kill()
    assert living_holder(store, "c") is None
    assert read_holder(store, "c") is not None, "the lease still names it"
    with campaign_lock(store, "c"):
        pass


def test_heartbeats_continue(store: Store) -> None:
    with campaign_lock(store, "c"):
        first = read_holder(store, "c")
        time.sleep(0.5)
        last = read_holder(store, "c")
    assert first is not None
    assert last is not None
    assert (last.token, last.beat > first.beat) == (first.token, True)


@pytest.mark.parametrize("name", ["", "a/b", "a@b", "../a", "a*", "x" * 101])
def test_bad_campaign_name_is_rejected(store: Store, name: str) -> None:
    with pytest.raises(UsageError):
        Ledger(store, name)
