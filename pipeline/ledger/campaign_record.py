"""What a campaign comprises, as the ledger keeps it: enough to show the campaign again when MLflow has lost it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pipeline.exit_codes import INFRASTRUCTURE
from pipeline.ledger.ledger import Ledger
from pipeline.records.class_facts import ClassFacts
from pipeline.records.outcome import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One outcome of a campaign, which lies in the ledger under its judge_key.

    Attributes:
        cached: taken over from an earlier campaign.
    """

    judge_key: str
    model: str
    device_class: str
    cached: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignRecord:
    """A campaign: written when it starts, with what is planned, and when it ends, with what was reached.

    Attributes:
        catalog: what was asked for, for people.
        started: seconds since the epoch.
        finished: seconds since the epoch; None of a campaign that goes on, or was killed.
        exit_code: without regard to MLflow, which can be brought up to date later; None until the end.
        interrupted: stopped by a person.
        members: its outcomes, in the order of the catalog; until it ends, those that it is to reach.
        unreached: what was planned and not reached when it ended. Records of earlier releases lack it.
        problems: the outcomes of bad entries, which no key finds; shown last.
        facts: what each class was planned for: its thread count and toolchain, which are in the keys. Earlier releases kept none.
    """

    catalog: str
    started: float
    finished: float | None = None
    exit_code: int | None = None
    interrupted: bool = False
    members: tuple[Member, ...]
    unreached: tuple[Member, ...] = ()
    problems: tuple[Outcome, ...] = ()
    facts: Mapping[str, ClassFacts] = field(default_factory=dict)

    @property
    def num_planned(self) -> int:
        """How many outcomes it is to reach, or was to reach; those of bad entries among them."""
        return len(self.members) + len(self.unreached) + len(self.problems)

    @property
    def is_complete(self) -> bool:
        """Whether it came to its end: a next start of the same name is another pass over the catalog."""
        return self.finished is not None and not self.interrupted and self.exit_code != INFRASTRUCTURE

    def to_json(self) -> dict[str, Any]:
        """The ledger's form; members are lists, since a fleet has tens of thousands."""
        return {
            "catalog": self.catalog,
            "started": self.started,
            "finished": self.finished,
            "exit_code": self.exit_code,
            "interrupted": self.interrupted,
            "members": [list(asdict(member).values()) for member in self.members],
            "unreached": [list(asdict(member).values()) for member in self.unreached],
            "problems": [outcome.to_json() for outcome in self.problems],
            "facts": {
                name: {"num_threads": facts.num_threads, "toolchain": dict(facts.toolchain)} for name, facts in self.facts.items()
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CampaignRecord:
        """The record that `to_json` wrote."""
        problems = tuple(Outcome.from_json(item) for item in data["problems"])
        members = {"members": _members(data["members"]), "unreached": _members(data.get("unreached", ()))}
        facts = {name: ClassFacts(**item) for name, item in data.get("facts", {}).items()}
        return cls(**{**data, **members, "problems": problems, "facts": facts})


def _members(rows: Sequence[Sequence[Any]]) -> tuple[Member, ...]:
    return tuple(Member(judge_key=key, model=model, device_class=name, cached=cached) for key, model, name, cached in rows)


def members_of(outcomes: Sequence[Outcome]) -> tuple[Member, ...]:
    """The members that some outcomes are."""
    return tuple(Member(judge_key=o.judge_key, model=o.model, device_class=o.device_class, cached=o.cached) for o in outcomes)


class Continued:
    """What a campaign goes on with when it is started again before it had come to its end (killed, interrupted, the store lost).

    The outcomes that it had reached are its own, not taken over from an earlier one: it ends as if nothing had stopped it.

    Args:
        ledger: of the campaign.
        started: of this start, in seconds since the epoch.

    Attributes:
        started: of the start that it goes on from; `started` of a campaign that is new, or had ended.
        own_since: since when what it reached is its own; infinite of a campaign that is new, or had ended.
        facts: of each class, what it was planned for then; none of a campaign that is new, or had ended.
    """

    def __init__(self, ledger: Ledger, started: float) -> None:
        row = ledger.find("campaign", ledger.campaign)
        record = CampaignRecord.from_json(row.data) if row is not None else None
        self._ledger = ledger
        since = ledger.unended_since
        # A driver that died after it wrote its end was telling MLflow; one that started later died in another pass, or in a replay.
        died_telling = record is not None and record.finished is not None and since is not None and since < record.finished
        before = record if record is not None and (not record.is_complete or died_telling) else None
        self.started = started if before is None else before.started
        self.own_since = math.inf if before is None else before.started
        self.facts: Mapping[str, ClassFacts] = {} if before is None else before.facts

    def reached(self, outcome: Outcome) -> Outcome:
        """The outcome as this campaign's own, if it is: another may have done the same since, and an own one may not stand."""
        row = self._ledger.own("outcome", outcome.judge_key, outcome.model) if outcome.cached else None
        if row is None or row.time < self.own_since:
            return outcome
        own = _content(Outcome.from_json(row.data["outcome"])) == _content(outcome)
        return replace(outcome, cached=False) if own else outcome


def _content(outcome: Outcome) -> str:
    """What was reached, without what a catalog says of it; a text, since figures that are no numbers are equal in none but that."""
    return json.dumps({**outcome.to_json(), "cached": None, "tags": None, "registered_name": None}, sort_keys=True)
