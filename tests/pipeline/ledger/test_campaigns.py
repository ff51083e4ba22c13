"""Campaign records, and what a continued campaign takes from its earlier start."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from freezer.store import Store
from pipeline.ledger import CampaignRecord, Continued, Ledger, Member
from pipeline.records import ClassFacts
from tests.support.steps import python

FACTS = {"portable": ClassFacts(num_threads=4, toolchain={"torch": "2.13.0", "driver": None})}
RECORD = CampaignRecord(catalog="c", started=1.0, members=(), facts=FACTS)


def continued(store: Store, record: CampaignRecord) -> Continued:
    with Ledger(store, "c") as ledger:
        ledger.append("campaign", "c", model="", device_class="", data=record.to_json())
        return Continued(ledger, 5.0)


def test_fields_of_later_releases_are_ignored() -> None:
    record = replace(
        RECORD, members=(Member(judge_key="j", model="m", device_class="portable", cached=True),)
    )
    written = json.loads(json.dumps(record.to_json()))
    written["facts"]["portable"]["later"] = 1
    written["members"][0].append("later")
    assert CampaignRecord.from_json({**written, "later": {}}) == record


def test_stopped_campaign_keeps_its_facts(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    assert continued(store, RECORD).facts == FACTS
    interrupted = replace(RECORD, finished=2.0, exit_code=130, interrupted=True)
    assert (continued(store, interrupted).facts, continued(store, interrupted).started) == (
        FACTS,
        1.0,
    )


KILLED = """
import os, signal, sys, time
from freezer.store.artifact_store import Store
from pipeline.ledger.campaigns import CampaignRecord
from pipeline.ledger.lease import campaign_lock
from pipeline.ledger.ledger import Ledger, ledger_folder

def end(ledger):
    record = CampaignRecord(catalog="c", started=1.0, members=(), finished=time.time(), exit_code=0)
    ledger.append("campaign", "c", model="", device_class="", data=record.to_json())

def drive(step):
    replays = step in ("replayed", "replaying")
    with campaign_lock(store, "c") if replays else Ledger(store, "c") as held:
        if step in ("passed", "telling"):
            end(held)
        if step in ("started", "telling", "replaying"):
            os.kill(os.getpid(), signal.SIGKILL)

store = Store.open(sys.argv[1])
for step in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        drive(step)
        os._exit(0)
    os.waitpid(child, 0)
"""
"""Drivers in a row: `passed` ends, `replayed` is a whole replay, and the others are killed:
`started` before it wrote anything, `telling` after it wrote its end, `replaying` in a replay."""


@pytest.mark.parametrize(
    ("drivers", "continues"),
    [
        (["passed"], False),
        (["passed", "started"], False),
        (["passed", "replaying"], False),
        (["telling", "started"], True),
        (["telling", "replaying"], True),
        (["telling", "replayed"], False),
    ],
)
def test_ended_pass_continues_only_if_its_driver_died(
    tmp_path: Path, drivers: list[str], continues: bool
) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    python(KILLED, store.root, *drivers)
    with Ledger(store, "c") as ledger:
        assert (Continued(ledger, time.time()).started == 1.0) == continues
