"""Campaign records: what a campaign that goes on takes from the start before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from freezer.store import Store
from pipeline.campaign_record import CampaignRecord, Continued
from pipeline.ledger import Ledger
from pipeline.tasks import ClassFacts

FACTS = {"portable": ClassFacts(num_threads=4, toolchain={"torch": "2.13.0", "driver": None})}
RECORD = CampaignRecord(catalog="c", started=1.0, members=(), facts=FACTS)


def continued(store: Store, record: CampaignRecord) -> Continued:
    with Ledger(store, "c") as ledger:
        ledger.append("campaign", "c", model="", device_class="", data=record.to_json())
        return Continued(ledger, 5.0)


def test_a_record_comes_back_as_it_was_and_so_does_one_of_an_earlier_release() -> None:
    written = json.loads(json.dumps(RECORD.to_json()))
    assert CampaignRecord.from_json(written) == RECORD
    del written["facts"]
    assert CampaignRecord.from_json(written) == replace(RECORD, facts={})


def test_a_campaign_that_was_stopped_goes_on_with_what_it_was_planned_for(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    assert continued(store, RECORD).facts == FACTS
    interrupted = replace(RECORD, finished=2.0, exit_code=130, interrupted=True)
    assert (continued(store, interrupted).facts, continued(store, interrupted).started) == (FACTS, 1.0)


def test_a_campaign_that_had_ended_is_planned_anew(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    ended = continued(store, replace(RECORD, finished=2.0, exit_code=0))
    assert (ended.facts, ended.started) == ({}, 5.0)
