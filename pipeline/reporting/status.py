"""The status of a campaign, from its ledger and lease: running, ended, or with a dead driver."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Literal

from freezer.codec import Json, frozen
from freezer.errors import INFRASTRUCTURE
from freezer.store import Store
from pipeline.catalog import PYTHON
from pipeline.ledger import (
    CampaignRecord,
    History,
    Holder,
    living_holder,
    read_holder,
    read_rows,
    refuse_registry,
)
from pipeline.records import Note, Outcome, Outcomes, Place, counts_text, iso

State = Literal["running", "finished", "interrupted", "broken off", "dead"]


@frozen
class Status:
    """The status of a campaign.

    Attributes:
        state: `dead` if it has not ended and its driver is gone.
        catalog: what was asked for.
        planned: number of outcomes to reach, including bad entries; `reached` are final.
        unchanged: reached outcomes that earlier campaigns finished.
        built, builds_failed: its own builds since its start.
        verdicts: number of outcomes by verdict.
        failures: model, class, verdict and reason of the failed and rejected ones.
        items: `model class` by verdict; `in progress` has a build of this campaign, `waiting` has
            none.
        started, last_sign, finished: seconds since the epoch; `last_sign` is the newest row or
            heartbeat.
        exit_code: None until it ended.
        driver: the current or last driver; None without a lease.
    """

    campaign: str
    state: State
    catalog: str
    planned: int
    reached: int
    unchanged: int
    built: int
    builds_failed: int
    verdicts: dict[str, int]
    failures: tuple[Mapping[str, str], ...]
    items: dict[str, list[str]]
    started: float
    last_sign: float
    finished: float | None
    exit_code: int | None
    driver: str | None

    def to_json(self) -> Json:
        """Return the status for programs, with times in ISO 8601, UTC."""
        finished = None if self.finished is None else iso(self.finished)
        times = {"started": iso(self.started), "last_sign": iso(self.last_sign)}
        return {**asdict(self), **times, "finished": finished}


def campaign_status(store: Store, campaign: str, note: Note = lambda _: None) -> Status:
    """Return the status of a campaign, without locking or writing.

    Args:
        store: that it publishes to.
        campaign: its name.
        note: receives a line if this function waits for a sign of life from a driver on another
            machine.

    Raises:
        UsageError: the store has no such campaign; the message lists those that it has.
        StoreUnreachableError: the ledger cannot be read.
    """
    holder, alive = driver_of(store, campaign, note)
    history = History(store)  # read after the lease
    record = history.record(campaign)
    signs = [record.started, record.finished or 0.0]
    if holder:
        signs.append(holder.beat_time)
    members = history.members(campaign, record)
    signs += [member.time for member in members if not member.outcome.cached]
    outcomes = [*(member.outcome for member in members), *record.problems]
    builds = {}
    for row in read_rows(history.folder, "build"):
        if row.campaign == campaign and row.time >= record.started:
            builds[row.key] = row
            signs.append(row.time)
    num_failed = sum(row.data.get("failure") is not None for row in builds.values())
    begun = {(row.model, row.device_class) for row in builds.values()}
    return Status(
        campaign=campaign,
        state=_state(alive, record),
        catalog=record.catalog,
        planned=record.num_planned,
        reached=len(outcomes),
        unchanged=sum(outcome.cached for outcome in outcomes),
        built=len(builds) - num_failed,
        builds_failed=num_failed,
        verdicts=dict(Counter(outcome.verdict for outcome in outcomes)),
        failures=tuple(_failed(outcome) for outcome in outcomes if outcome.failed),
        items=_items(outcomes, record, begun),
        started=record.started,
        last_sign=max(signs),
        finished=record.finished,
        exit_code=record.exit_code,
        driver=holder.who if holder else None,
    )


def _failed(outcome: Outcome) -> dict[str, str]:
    return {
        "model": outcome.model,
        "device_class": outcome.device_class,
        "verdict": outcome.verdict,
        "reason": outcome.coded_reason or "",
    }


def _items(
    outcomes: Outcomes,
    record: CampaignRecord,
    begun: Collection[Place],
) -> dict[str, list[str]]:
    """Return the items by state, in the order of the catalog."""
    items = defaultdict[str, list[str]](list)
    final = set()
    for outcome in outcomes:
        items[outcome.verdict].append(" ".join(outcome.place))
        final.add(outcome.place)
    for member in (*record.members, *record.unreached):
        if member.place not in final:
            state = "in progress" if member.place in begun else "waiting"
            items[state].append(" ".join(member.place))
    return dict(items)


def campaigns_in_words(store: Store, note: Note = lambda _: None) -> list[str]:
    """Return a line for each campaign of a store, oldest first: name, state, outcomes, start.

    Args:
        store: of the campaigns.
        note: as in `campaign_status`.

    Raises:
        StoreUnreachableError: the ledger cannot be read.
    """
    alive = {name: driver_of(store, name, note)[1] for name in History(store).campaigns()}
    history = History(store)  # read after the leases: a campaign that ended meanwhile is not dead
    lines = []
    for name, lives in alive.items():
        record = history.record(name)
        reached = len(history.outcomes(name, record))
        lines.append(
            f"{name}: {_state(lives, record)}, {reached} of {record.num_planned} outcomes, started"
            f" {iso(record.started)}"
        )
    return lines or ["the store has no campaigns yet; `coldpress optimize` runs one"]


def driver_of(
    store: Store,
    campaign: str,
    note: Note,
) -> tuple[Holder | None, bool]:
    """Return the holder of the lease of a campaign, and whether that driver is alive."""
    refuse_registry(store.uri)
    holder = read_holder(store, campaign)
    living = living_holder(store, campaign, note)
    return living or holder, living is not None


def _state(alive: bool, record: CampaignRecord) -> State:
    if alive:
        return "running"
    if record.finished is None:
        return "dead"
    if record.interrupted:
        return "interrupted"
    return "broken off" if record.exit_code == INFRASTRUCTURE else "finished"


MAX_LISTED = 20
"""Items that a line lists; `--json` has all."""

WHY = {
    "dead": "its driver is dead",
    "interrupted": "it was interrupted",
    "broken off": "it broke off",
}
"""Why a campaign did not finish, by state."""


def in_words(status: Status, store: str) -> list[str]:
    """Return the lines for people, with the command that continues an unfinished campaign."""
    verdicts = counts_text(sorted(status.verdicts.items())) or "none yet"
    ended = "not ended"
    if status.finished is not None:
        ended = f"ended {iso(status.finished)} with exit code {status.exit_code}"
    driver = f", {status.driver}" if status.driver else ""
    lines = [
        f"campaign {status.campaign} of {status.catalog}: {status.state}",
        f"started {iso(status.started)}, {ended}",
        f"{status.reached} of {status.planned} outcomes: {verdicts}; {status.unchanged} unchanged",
        f"{status.built} built, {status.builds_failed} builds failed",
        f"last sign of life {iso(status.last_sign)}{driver}",
    ]
    for name, items in status.items.items():
        if name not in ("failed", "rejected", "unstable"):
            lines.append(_listed(name, items))
    for failed in status.failures:
        lines.append("  {model} {device_class}: {verdict}: {reason}".format(**failed))
    if status.state in WHY:
        options = [status.catalog, "--campaign", status.campaign, "--store", store]
        again = f"`{shlex.join(['coldpress', 'optimize', *options])}` (or `coldpress submit`)"
        if status.catalog == PYTHON:
            again = "the same call of pipeline.run"
        lines.append(
            f"{WHY[status.state]}: {again}, with its original options,"
            " continues; finished work is not repeated"
        )
    return lines


def _listed(state: str, items: Sequence[str]) -> str:
    line = f"{state}: {', '.join(items[:MAX_LISTED])}"
    more = len(items) - MAX_LISTED
    return f"{line}, and {more} more (--json lists all)" if more > 0 else line
