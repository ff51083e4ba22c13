"""The status of a campaign, from its ledger and lease: running, ended, or with a dead driver."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from freezer.errors import INFRASTRUCTURE, StoreUnreachableError
from freezer.files import SCHEMES
from freezer.store import Store, one_spelling
from pipeline.ledger import (
    LEDGER,
    CampaignRecord,
    History,
    Holder,
    RowKind,
    lease_of,
    living_holder,
    read_holder,
    read_rows,
)
from pipeline.records import Outcome, iso

_BUILD: RowKind = "build"

State = Literal["running", "finished", "interrupted", "broken off", "dead"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedOutcome:
    """A failed or rejected outcome."""

    model: str
    device_class: str
    verdict: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The status of a campaign.

    Attributes:
        state: `dead` if it has not ended and its driver is gone.
        catalog: what was asked for.
        planned: number of outcomes to reach, including bad entries; `reached` are final.
        unchanged: reached outcomes that earlier campaigns finished.
        built, builds_failed: its own builds since its start.
        verdicts: number of outcomes by verdict.
        failures: the failed and rejected ones.
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
    failures: tuple[FailedOutcome, ...]
    items: dict[str, list[str]]
    started: float
    last_sign: float
    finished: float | None
    exit_code: int | None
    driver: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the status for programs, with times in ISO 8601, UTC."""
        times = {"started": self.started, "last_sign": self.last_sign, "finished": self.finished}
        return {
            **asdict(self),
            **{name: None if time is None else iso(time) for name, time in times.items()},
        }


def campaign_status(
    store: Store, campaign: str, note: Callable[[str], None] = lambda _: None
) -> Status:
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
    driver = _driver(store, campaign, note)
    return _status(History(store), campaign, *driver)


def status_if_known(
    uri: str, campaign: str, note: Callable[[str], None] = lambda _: None
) -> Status | None:
    """Return the status of a campaign; None if the folder of the store or the campaign does not
    exist yet.

    Args:
        uri: of the store that it publishes to.
        campaign, note: as in `campaign_status`.

    Raises:
        StoreUnreachableError: the bucket or the ledger cannot be read.
    """
    if urlparse(uri).scheme not in SCHEMES and not Path(one_spelling(uri)).exists():
        return None
    store = Store.open(uri)
    driver = _driver(store, campaign, note)
    history = History(store)
    return _status(history, campaign, *driver) if campaign in history.campaigns() else None


def _status(history: History, campaign: str, holder: Holder | None, alive: bool) -> Status:
    """Return the status of a campaign from a history that was read after the lease."""
    record = history.record(campaign)
    members = history.members(campaign, record)
    outcomes = [*(item.outcome for item in members), *record.problems]
    builds = {}
    begun: set[tuple[str, str]] = set()
    last_sign = max((record.started, *(item.time for item in members if not item.outcome.cached)))
    for row in read_rows(history.folder, kinds=(_BUILD,)):
        if row.campaign == campaign and row.time >= record.started:
            builds[row.key] = row.data["failure"]
            begun.add((row.model, row.device_class))
            last_sign = max(last_sign, row.time)
    return Status(
        campaign=campaign,
        state=_state(
            alive, record.finished, interrupted=record.interrupted, exit_code=record.exit_code
        ),
        catalog=record.catalog,
        planned=record.num_planned,
        reached=len(outcomes),
        unchanged=sum(outcome.cached for outcome in outcomes),
        built=sum(failure is None for failure in builds.values()),
        builds_failed=sum(failure is not None for failure in builds.values()),
        verdicts=dict(Counter(outcome.verdict for outcome in outcomes)),
        failures=tuple(
            FailedOutcome(
                model=o.model,
                device_class=o.device_class,
                verdict=o.verdict,
                reason=o.coded_reason or "",
            )
            for o in outcomes
            if o.failed
        ),
        items=_items(outcomes, record, begun),
        started=record.started,
        last_sign=max(last_sign, holder.beat_time if holder else 0.0, record.finished or 0.0),
        finished=record.finished,
        exit_code=record.exit_code,
        driver=holder.who if holder else None,
    )


def _items(
    outcomes: Sequence[Outcome], record: CampaignRecord, begun: Collection[tuple[str, str]]
) -> dict[str, list[str]]:
    """Return the items by state, in the order of the catalog."""
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.verdict, []).append(f"{outcome.model} {outcome.device_class}")
    final = {(outcome.model, outcome.device_class) for outcome in outcomes}
    for member in (*record.members, *record.unreached):
        item = (member.model, member.device_class)
        if item not in final:
            found.setdefault("in progress" if item in begun else "waiting", []).append(
                " ".join(item)
            )
    return found


def campaigns_in_words(store: Store, note: Callable[[str], None] = lambda _: None) -> list[str]:
    """Return a line for each campaign of a store, oldest first: name, state, outcomes, start.

    Args:
        store: of the campaigns.
        note: as in `campaign_status`.

    Raises:
        StoreUnreachableError: the ledger cannot be read.
    """
    alive = {name: _driver(store, name, note)[1] for name in History(store).campaigns()}
    history = History(store)  # read after the leases: a campaign that ended meanwhile is not dead
    lines = []
    for name, lives in alive.items():
        record = history.record(name)
        state = _state(
            lives, record.finished, interrupted=record.interrupted, exit_code=record.exit_code
        )
        reached = len(history.members(name, record)) + len(record.problems)
        lines.append(
            f"{name}: {state}, {reached} of {record.num_planned} outcomes, started"
            f" {iso(record.started)}"
        )
    return lines or ["the store has no campaigns yet; `python -m jobs.optimize` runs one"]


def _driver(store: Store, campaign: str, note: Callable[[str], None]) -> tuple[Holder | None, bool]:
    """Return the holder of the lease of a campaign, and whether that driver is alive."""
    path = lease_of(store.root / LEDGER, campaign, store.remote)
    try:
        holder = read_holder(path)
        if holder is None:
            return None, False
        if holder.is_here():
            return holder, not holder.is_dead()
        living = living_holder(path, note)
    except OSError as error:
        raise StoreUnreachableError(f"the lease {path} cannot be read: {error}") from error
    return living or holder, living is not None


def _state(
    alive: bool, finished: float | None, *, interrupted: bool, exit_code: int | None
) -> State:
    if alive:
        return "running"
    if finished is None:
        return "dead"
    if interrupted:
        return "interrupted"
    return "broken off" if exit_code == INFRASTRUCTURE else "finished"


def in_words(status: Status, store: str) -> list[str]:
    """Return the lines for people, with the command that continues an unfinished campaign."""
    took = (status.finished or time.time()) - status.started
    lines = [
        f"campaign {status.campaign} of {status.catalog}: {status.state}"
        + (
            f", exit code {status.exit_code}"
            if status.exit_code is not None and status.state != "running"
            else ""
        ),
        (
            f"started {iso(status.started)}, {took:.0f} s ago"
            if status.finished is None
            else f"started {iso(status.started)}, ended {iso(status.finished)}"
        ),
        (
            f"{status.reached} of {status.planned} outcomes: {_counted(status.verdicts)};"
            f" {status.unchanged} unchanged"
        ),
        f"{status.built} built, {status.builds_failed} builds failed",
        f"last sign of life {iso(status.last_sign)}"
        + (f", {status.driver}" if status.driver else ""),
    ]
    lines += [
        f"{name}: {_listed(items)}"
        for name, items in status.items.items()
        if name not in ("failed", "rejected", "unstable")
    ]
    lines += [
        f"  {item.model} {item.device_class}: {item.verdict}: {item.reason}"
        for item in status.failures
    ]
    if status.state == "running":
        return lines
    if status.state != "finished":
        again = shlex.join(
            [
                "python",
                "-m",
                "jobs.optimize",
                status.catalog,
                "--campaign",
                status.campaign,
                "--store",
                store,
            ]
        )
        why = {
            "dead": "its driver is dead",
            "interrupted": "it was interrupted",
            "broken off": "it broke off",
        }[status.state]
        lines.append(
            f"{why}: `{again}` (or jobs.submit), with its original options, continues; finished"
            " work is not repeated"
        )
    return lines


MAX_LISTED = 20
"""Items that a line lists; `--json` has all."""


def _listed(items: Sequence[str]) -> str:
    more = (
        f", and {len(items) - MAX_LISTED} more (--json lists all)"
        if len(items) > MAX_LISTED
        else ""
    )
    return ", ".join(items[:MAX_LISTED]) + more


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none yet"
