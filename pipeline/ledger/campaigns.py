"""Campaigns in the ledger: the record of each, enough to show it again if MLflow has lost it; and
the history of a store, its campaigns and their outcomes, read without a lock.

A campaign shows the outcomes that its record names. A killed campaign shows its own final outcomes,
and cached outcomes of models whose outcomes are all final.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any, NamedTuple

from freezer.codec import Json, JsonView, checked_row, decode, encode, frozen
from freezer.errors import INFRASTRUCTURE, UsageError
from freezer.store import Store
from pipeline.ledger.ledger import Ledger, keep_newest, ledger_folder
from pipeline.ledger.segments import LedgerRow, read_rows
from pipeline.records import FleetFacts, Outcome, Outcomes, Place, iso


class Member(NamedTuple):
    """One outcome of a campaign, which the ledger stores under its judge_key.

    Attributes:
        cached: taken over from an earlier campaign.
    """

    judge_key: str
    model: str
    device_class: str
    cached: bool

    @property
    def place(self) -> Place:
        """The model and the device class."""
        return self.model, self.device_class


@frozen
class CampaignRecord:
    """A campaign: written at its start with what is planned, and at its end with what was reached.

    Attributes:
        catalog: name of the catalog, for people.
        started: seconds since the epoch.
        finished: seconds since the epoch; None while it runs, or if it was killed.
        exit_code: regardless of MLflow, which a replay can update later; None until the end.
        interrupted: stopped by a person.
        members: its outcomes, in the order of the catalog; until the end, the planned ones.
        unreached: planned outcomes that were not reached at the end. Earlier releases did not store
            them.
        problems: outcomes of bad entries, which have no key; shown last.
        facts: by device class, the thread count and toolchain that the keys contain. Earlier
            releases did not store them.
        driver: versions of the driver's packages, and the commit of the catalog's checkout. Earlier
            releases did not store them.
    """

    catalog: str
    started: float
    finished: float | None = None
    exit_code: int | None = None
    interrupted: bool = False
    members: tuple[Member, ...] = ()
    unreached: tuple[Member, ...] = ()
    problems: tuple[Outcome, ...] = ()
    facts: FleetFacts = field(default_factory=dict)
    driver: Mapping[str, str] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, str]:
        """What the campaign was made with, by name, for people."""
        tools: dict[str, set[str]] = {}
        for facts in self.facts.values():
            for name, version in facts.toolchain.items():
                if version:
                    tools.setdefault(name, set()).add(str(version))
        parameters = {"device_classes": ", ".join(sorted(self.facts))} if self.facts else {}
        parameters |= {name: ", ".join(sorted(versions)) for name, versions in tools.items()}
        return parameters | dict(self.driver)

    @property
    def num_planned(self) -> int:
        """Number of planned outcomes, including those of bad entries."""
        return len(self.members) + len(self.unreached) + len(self.problems)

    @property
    def is_complete(self) -> bool:
        """Whether it has ended, so that the next start with this name is another pass over the
        catalog.
        """
        failed = self.interrupted or self.exit_code == INFRASTRUCTURE
        return self.finished is not None and not failed

    @property
    def is_pass(self) -> bool:
        """Whether every planned outcome was reached, so that it can be compared with others."""
        return self.finished is not None and not self.interrupted and not self.unreached

    def to_json(self) -> Json:
        """Return the ledger's form. Members are lists: a fleet has tens of thousands."""
        facts = {
            name: {
                "num_threads": of_class.num_threads,
                "toolchain": dict(of_class.toolchain),
                "is_best": of_class.is_best,
            }
            for name, of_class in self.facts.items()
        }
        problems = [outcome.to_json() for outcome in self.problems]
        return encode(self) | {"problems": problems, "facts": facts}

    @classmethod
    @checked_row("campaign")
    def from_json(cls, data: JsonView) -> CampaignRecord:
        """Return the record that `to_json` wrote."""
        without = {**data, "members": [], "unreached": [], "problems": []}
        plain = decode(cls, without, origin="campaign row")
        for seconds in (plain.started, plain.finished or 0.0):
            iso(seconds)  # raises if it is not a time
        return replace(
            plain,
            members=_members_from(data["members"]),
            unreached=_members_from(data.get("unreached", ())),
            problems=tuple(Outcome.from_json(item) for item in data["problems"]),
        )


def _members_from(rows: Sequence[Sequence[Any]]) -> tuple[Member, ...]:
    """Return the members of a row of any release; later ones may append fields."""
    members = [Member(*row[: len(Member._fields)]) for row in rows]
    for member in members:
        if tuple(map(type, member)) != (str, str, str, bool):
            raise ValueError(f"got the member {member}, expected three texts and a bool")
    return tuple(members)


def members_of(outcomes: Outcomes) -> tuple[Member, ...]:
    """Return the members for some outcomes."""
    return tuple(Member(o.judge_key, o.model, o.device_class, o.cached) for o in outcomes)


class Continued:
    """State of a campaign that continues after it was killed, interrupted, or lost its store.

    The outcomes that it had reached count as its own, not as taken over from an earlier campaign.

    Args:
        ledger: of the campaign.
        started: time of this start, in seconds since the epoch.

    Attributes:
        started: time of the start that it continues; of a new campaign, of this start.
        own_since: outcomes from this time on are its own; infinite for a new campaign.
        facts: by device class, what the earlier start was planned for; empty for a new campaign.
    """

    def __init__(self, ledger: Ledger, started: float) -> None:
        row = ledger.find("campaign", ledger.campaign)
        record = CampaignRecord.from_json(row.data) if row is not None else None
        self._ledger = ledger
        since = ledger.unended_since
        # A driver that died after it wrote its end was updating MLflow; one that started later died
        # in another pass or a replay.
        if record is not None and record.is_complete:
            ended = record.finished
            if ended is None or since is None or since >= ended:
                record = None
        self.own_since = math.inf if record is None else record.started
        self.started = min(started, self.own_since)
        self.facts: FleetFacts = {} if record is None else record.facts

    def reached(self, outcome: Outcome) -> Outcome:
        """Return an outcome as this campaign's own if it reached the same one itself; another
        campaign may have too.
        """
        if not outcome.cached:
            return outcome
        row = self._ledger.own("outcome", outcome.judge_key, outcome.model)
        if row is None or row.time < self.own_since:
            return outcome
        own = _content(row.outcome) == _content(outcome)
        return replace(outcome, cached=False) if own else outcome


def _content(outcome: Outcome) -> str:
    """Return an outcome without its catalog fields, as a text: NaN figures are equal only there."""
    without = dict.fromkeys(("cached", "tags", "registered_name"))
    return json.dumps(outcome.to_json() | without, sort_keys=True)


@frozen
class Reached:
    """An outcome, and the time it was reached, in seconds since the epoch."""

    outcome: Outcome
    time: float


class History:
    """A ledger read without a lock: the newest rows of every campaign.

    Attributes:
        folder: of the ledger; for a bucket, of this machine's copy.
    """

    def __init__(self, store: Store) -> None:
        self.folder = ledger_folder(store)
        self._keys: dict[str, set[str]] = {}  # judge_keys by model
        self._records: dict[str, LedgerRow] = {}
        self._passes: dict[str, LedgerRow] = {}  # of those that ended, the last
        # By judge_key and model, then by campaign.
        self._outcomes: dict[tuple[str, str], dict[str, LedgerRow]] = {}
        self._decoded: dict[LedgerRow, Outcome] = {}
        for row in read_rows(self.folder, "campaign", "pass", "outcome"):
            if row.kind != "outcome":
                keep_newest(self._records if row.kind == "campaign" else self._passes, row.key, row)
            else:
                keep_newest(self._outcomes.setdefault((row.key, row.model), {}), row.campaign, row)
                self._keys.setdefault(row.model, set()).add(row.key)

    def campaigns(self) -> list[str]:
        """Return the names of all campaigns, oldest first."""
        return sorted(self._records, key=lambda name: self._records[name].time)

    def recorded(self, campaign: str) -> float:
        """When the record of a campaign was written, in seconds since the epoch; 0 without one."""
        return self._records[campaign].time if campaign in self._records else 0.0

    def record(self, campaign: str) -> CampaignRecord:
        """Return the record of a campaign.

        Raises:
            UsageError: the ledger does not have the campaign.
        """
        row = self._records.get(campaign)
        if row is None:
            known = ", ".join(self.campaigns()) or "none"
            raise UsageError(
                f"the ledger {self.folder} has no campaign {campaign!r}; it has: {known}"
            )
        return CampaignRecord.from_json(row.data)

    def last_pass(self, campaign: str) -> CampaignRecord:
        """Return the record of the last pass of a campaign that ended, or of one that earlier
        releases wrote.

        Raises:
            UsageError: the ledger does not have the campaign, or no pass of it has ended with
                outcomes.
        """
        record = self.record(campaign)
        if not record.is_pass and campaign in self._passes:
            record = CampaignRecord.from_json(self._passes[campaign].data)
        if not record.is_pass or not record.num_planned:
            raise UsageError(
                f"campaign {campaign!r} has not finished a pass over its catalog; run its command"
                f" again until it ends, or name another campaign: {', '.join(self.campaigns())}"
            )
        return record

    def members(self, campaign: str, record: CampaignRecord) -> list[Reached]:
        """Return the final outcomes of a campaign, in the order of the catalog."""
        until = math.inf if record.finished is None else record.finished
        pairs = [(member, self._row(campaign, member, until)) for member in record.members]
        unfinished = {member.model for member, row in pairs if row is None}
        reached = []
        for member, row in pairs:
            is_hidden = member.cached and member.model in unfinished
            if row is not None and not is_hidden:
                reached.append(self._reached(row, cached=member.cached))
        return reached

    def outcomes(self, campaign: str, record: CampaignRecord) -> list[Outcome]:
        """Return the outcomes of a pass of a campaign, in the order of the catalog; those of bad
        entries come last.
        """
        reached = [item.outcome for item in self.members(campaign, record)]
        return [*reached, *record.problems]

    def of_model(self, model: str) -> list[Reached]:
        """Return every outcome that the ledger has of a model, the oldest first."""
        keys = self._keys.get(model, ())
        rows = [row for key in keys for row in self._outcomes[key, model].values()]
        return [self._reached(row) for row in sorted(rows, key=lambda row: row.time)]

    def models(self) -> list[str]:
        """Return the names of all models with an outcome, sorted."""
        return sorted(self._keys)

    def others(self, campaign: str, record: CampaignRecord) -> list[Reached]:
        """Return outcomes that only earlier starts of a campaign reached: the newest of each model
        and class not in its record.
        """
        named = {member.place for member in record.members}
        newest: dict[Place, LedgerRow] = {}
        for rows in self._outcomes.values():
            row = rows.get(campaign)
            if row is not None and (row.model, row.device_class) not in named:
                keep_newest(newest, (row.model, row.device_class), row)
        return [self._reached(row) for row in newest.values()]

    def _row(
        self,
        campaign: str,
        member: Member,
        until: float,
    ) -> LedgerRow | None:
        """Return the campaign's own row of a member; for a cached member, the newest row at that
        time.
        """
        rows = self._outcomes.get((member.judge_key, member.model), {})
        if not member.cached:
            return rows.get(campaign)
        before = [row for row in rows.values() if row.time <= until]
        if before:
            return max(before, key=lambda row: row.time)
        return min(rows.values(), key=lambda row: row.time, default=None)

    def _reached(self, row: LedgerRow, *, cached: bool = False) -> Reached:
        """The outcome of a row, cached or not as in its campaign. A page reads each twice."""
        outcome = self._decoded.get(row)
        if outcome is None:
            outcome = self._decoded[row] = row.outcome
        return Reached(outcome=replace(outcome, cached=cached), time=row.time)
