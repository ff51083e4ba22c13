"""Metrics of a campaign, scraped by HTTP: they equal its events and its ledger."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

import jobs.optimize
from freezer.errors import UsageError
from freezer.store import Store
from pipeline.records import Event, LiveFigures
from pipeline.reporting import Display, campaign_status, metered
from tests.support.campaigns import Models, run_judged
from tests.support.commands import invoked
from tests.support.past_outcomes import EVENTS, FAILED, WORK
from tests.support.raylets import LOOPBACK, free_port
from tests.support.scrapes import Scrape, scraped, summed
from tests.support.steps import HERE

MODELS: Models = {
    "gone": {HERE: "failed", "portable": "failed"},
    "noisy": {HERE: "unstable", "portable": "rejected"},
}
BAD = replace(FAILED, model="bad", device_class="auto", judge_key="")


def test_steps_are_counted_while_they_run() -> None:
    port = free_port()
    with metered(Display(), "c", f"{LOOPBACK}:{port}") as display:
        display.plan(3, WORK)
        display.observe(lambda: LiveFigures(nodes={"portable": 2}, num_logged=5, num_unlogged=3))
        for event in EVENTS[:3]:
            display.show(event)
        started = scraped(port)
        built = Event(kind="built", what="m portable", recipes=("portable",), seconds=1.0)
        for event in (*EVENTS[3:-1], built, Event(kind="judge", what="m portable")):
            display.show(event)
        judging = scraped(port)
        display.show(Event(kind="retried", what="m portable", unstable=True))
        display.show(EVENTS[-1])
        ended = scraped(port)
    assert summed(started, "coldpress_items", "state") == {"building": 2, "decided": 1}
    assert summed(started, "coldpress_steps_in_flight", "step") == {"build": 3}
    assert summed(judging, "coldpress_items", "state") == {"judging": 1, "decided": 2}
    assert summed(judging, "coldpress_steps_in_flight", "step") == {"judge": 1}
    assert summed(ended, "coldpress_items", "state") == {"waiting": 1, "final": 1, "decided": 1}
    assert summed(ended, "coldpress_build_seconds_count", "device_class") == {
        "cpu-x86-64-v4": 2,
        "portable": 1,
    }
    assert summed(ended, "coldpress_build_seconds_sum") == {"c": 9.0}
    assert summed(ended, "coldpress_judge_seconds_sum", "device_class") == {"cpu-x86-64-v4": 9.0}
    assert summed(ended, "coldpress_unstable_judges_total") == {"c": 1}
    assert summed(ended, "coldpress_failures_total", "code") == {"crash": 1}
    assert summed(ended, "coldpress_nodes", "device_class") == {"portable": 2}
    assert summed(ended, "coldpress_mlflow_backlog") == {"c": 3}
    assert summed(ended, "coldpress_mlflow_logged_total") == {"c": 5}


def test_outcomes_equal_those_of_the_ledger(store: Store, uri: str) -> None:
    port, scrapes = free_port(), list[Scrape]()

    def after(_: int) -> None:
        scrapes.append(scraped(port))

    with metered(Display(), "c", f"{LOOPBACK}:{port}") as display:
        run_judged(
            store, uri, "c", {}, models=MODELS, problems=(BAD,), display=display, after=after
        )
        scrapes.append(scraped(port))
    status = campaign_status(store, "c")
    final = [summed(scrape, "coldpress_items", "state")["final"] for scrape in scrapes]
    assert final == [1, 3, 3, 5, 5]
    assert summed(scrapes[-1], "coldpress_outcomes_total", "verdict") == status.verdicts
    assert sum(summed(scrapes[-1], "coldpress_failures_total").values()) == 4


@pytest.mark.parametrize("address", ["9105", ":9105", f"{LOOPBACK}:http", f"{LOOPBACK}:70000"])
def test_invalid_addresses_are_usage_errors(address: str) -> None:
    with (
        pytest.raises(UsageError),
        metered(Display(), "c", address),
    ):
        pass


def test_a_port_in_use_stops_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ["--store", str(tmp_path / "store"), "--metrics", f"{LOOPBACK}:{port}"]
        done = invoked(jobs.optimize.app, "catalog.yaml", *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("CP-USAGE: ")
    assert str(port) in done.stderr
    assert not (tmp_path / "store").exists()
