"""The status of a campaign, from its ledger and lease: running, ended, or with a dead driver."""

from __future__ import annotations

import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlparse

from freezer.errors import INFRASTRUCTURE, StoreUnreachableError
from freezer.files import SCHEMES
from freezer.store import Store, one_spelling
from pipeline.ledger import (
    LEDGER,
    CampaignRecord,
    History,
    Holder,
    LedgerRow,
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

    def to_json(self) -> dict[str, object]:
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
    builds: dict[str, LedgerRow] = {}
    for row in read_rows(history.folder, kinds=(_BUILD,)):
        if row.campaign == campaign and row.time >= record.started:
            builds[row.key] = row
    num_failed = sum(row.data["failure"] is not None for row in builds.values())
    signs = [record.started, record.finished or 0.0, *(row.time for row in builds.values())]
    signs += [item.time for item in members if not item.outcome.cached]
    signs += [holder.beat_time] if holder else []
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
        items=_items(outcomes, record, {(row.model, row.device_class) for row in builds.values()}),
        started=record.started,
        last_sign=max(signs),
        finished=record.finished,
        exit_code=record.exit_code,
        driver=holder.who if holder else None,
    )


def _failed(outcome: Outcome) -> FailedOutcome:
    return FailedOutcome(
        model=outcome.model,
        device_class=outcome.device_class,
        verdict=outcome.verdict,
        reason=outcome.coded_reason or "",
    )


def _items(
    outcomes: Sequence[Outcome], record: CampaignRecord, begun: Collection[tuple[str, str]]
) -> dict[str, list[str]]:
    """Return the items by state, in the order of the catalog."""
    states = defaultdict[str, list[str]](list)
    final = set()
    for outcome in outcomes:
        states[outcome.verdict].append(f"{outcome.model} {outcome.device_class}")
        final.add((outcome.model, outcome.device_class))
    for member in (*record.members, *record.unreached):
        item = (member.model, member.device_class)
        if item not in final:
            states["in progress" if item in begun else "waiting"].append(" ".join(item))
    return dict(states)


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
        reached = len(history.members(name, record)) + len(record.problems)
        lines.append(
            f"{name}: {_state(lives, record)}, {reached} of {record.num_planned} outcomes, started"
            f" {iso(record.started)}"
        )
    return lines or ["the store has no campaigns yet; `coldpress optimize` runs one"]


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
    lines = [_first_line(status), _times(status)]
    counts = ", ".join(f"{count} {name}" for name, count in sorted(status.verdicts.items()))
    lines.append(
        f"{status.reached} of {status.planned} outcomes: {counts or 'none yet'};"
        f" {status.unchanged} unchanged"
    )
    lines.append(f"{status.built} built, {status.builds_failed} builds failed")
    driver = f", {status.driver}" if status.driver else ""
    lines.append(f"last sign of life {iso(status.last_sign)}{driver}")
    for name, items in status.items.items():
        if name not in ("failed", "rejected", "unstable"):
            more = len(items) - MAX_LISTED
            rest = f", and {more} more (--json lists all)" if more > 0 else ""
            lines.append(f"{name}: {', '.join(items[:MAX_LISTED])}{rest}")
    for item in status.failures:
        lines.append(f"  {item.model} {item.device_class}: {item.verdict}: {item.reason}")
    if status.state in WHY:
        options = [status.catalog, "--campaign", status.campaign, "--store", store]
        again = shlex.join(["coldpress", "optimize", *options])
        lines.append(
            f"{WHY[status.state]}: `{again}` (or `coldpress submit`), with its original options,"
            " continues; finished work is not repeated"
        )
    return lines


def _first_line(status: Status) -> str:
    line = f"campaign {status.campaign} of {status.catalog}: {status.state}"
    if status.exit_code is None or status.state == "running":
        return line
    return f"{line}, exit code {status.exit_code}"


def _times(status: Status) -> str:
    started = f"started {iso(status.started)}"
    if status.finished is not None:
        return f"{started}, ended {iso(status.finished)}"
    return f"{started}, {time.time() - status.started:.0f} s ago"
