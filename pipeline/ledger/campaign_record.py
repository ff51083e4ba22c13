"""The record of a campaign in the ledger: enough to show the campaign again if MLflow has
lost it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any, NamedTuple

from freezer.codec import Json, JsonView, checked_row, decode, encode, frozen
from freezer.errors import INFRASTRUCTURE
from pipeline.ledger.ledger import Ledger
from pipeline.records import FleetFacts, Outcome, Outcomes, iso


class Member(NamedTuple):
    """One outcome of a campaign, which the ledger stores under its judge_key.

    Attributes:
        cached: taken over from an earlier campaign.
    """

    judge_key: str
    model: str
    device_class: str
    cached: bool


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
        facts = {}
        for name, of_class in self.facts.items():
            toolchain = dict(of_class.toolchain)
            facts[name] = {
                "num_threads": of_class.num_threads,
                "toolchain": toolchain,
                "is_best": of_class.is_best,
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
    return tuple(
        Member(
            judge_key=o.judge_key,
            model=o.model,
            device_class=o.device_class,
            cached=o.cached,
        )
        for o in outcomes
    )


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
        self.started = started if record is None else record.started
        self.own_since = math.inf if record is None else record.started
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
