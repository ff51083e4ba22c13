"""Replay: bring MLflow up to date from the ledger alone. Repeating it changes nothing.

A campaign shows the outcomes that its record names. A killed campaign shows its own final outcomes, and cached outcomes of models
whose outcomes are all final. Outcomes that only an earlier start of the campaign reached get runs, but no row in the summary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from freezer.errors import InfrastructureError, UsageError
from freezer.store.store import Store
from pipeline.exit_codes import INTERRUPTED
from pipeline.ledger.campaign_record import CampaignRecord, Member
from pipeline.ledger.lease import campaign_lock
from pipeline.ledger.ledger import keep_newest, ledger_folder
from pipeline.ledger.segments import LedgerRow, part_paths, read_rows
from pipeline.records.outcome import Outcome
from pipeline.tracking.registry import ArtifactMode
from pipeline.tracking.tracker import Tracker


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """An outcome, and the time it was reached, in seconds since the epoch."""

    outcome: Outcome
    time: float


def replay(
    store: Store, tracking_uri: str, campaign: str | None, *, mode: ArtifactMode = "copy", say: Callable[[str], None] = print
) -> list[str]:
    """Log the outcomes that MLflow does not show, of one campaign or of all, oldest first.

    Args:
        store: store of the campaigns; its ledger is only read.
        tracking_uri: URI of MLflow.
        campaign: name; None means all that are not running.
        mode: whether MLflow stores whole artifacts, or references.
        say: prints a line.

    Returns:
        Errors, one sentence each.

    Raises:
        UsageError: the store has no such campaign; the message lists existing ones.
        InfrastructureError: the campaign is running.
        StoreUnreachableError: the store or its ledger cannot be read.
    """
    history = History(store)
    if campaign is not None:
        history.record(campaign)
        return _replay_one(store, history, tracking_uri, campaign, mode, say).failures
    failures: list[str] = []
    for name in history.campaigns():
        try:
            tracker = _replay_one(store, history, tracking_uri, name, mode, say)
        except InfrastructureError as error:
            say(f"campaign {name} is skipped: {error}")
            continue
        failures += tracker.failures
        if tracker.broke_off:
            break
    return failures


def _replay_one(
    store: Store, history: History, tracking_uri: str, campaign: str, mode: ArtifactMode, say: Callable[[str], None]
) -> Tracker:
    with campaign_lock(ledger_folder(store), campaign, say, remote=store.remote):
        history.refresh(campaign)
        record = history.record(campaign)
        members = history.members(campaign, record)
        models: dict[str, list[Reached]] = {}
        for item in (*history.others(campaign, record), *members):
            models.setdefault(item.outcome.model, []).append(item)
        tracker = Tracker(tracking_uri, campaign, store, mode=mode)
        tracker.start(record.catalog, record.started, resume=False)
        for of_model in models.values():
            tracker.log([item.outcome for item in of_model], reached=max(item.time for item in of_model))
        killed = record.finished is None
        tracker.finish(
            [*(item.outcome for item in members), *record.problems],
            INTERRUPTED if record.exit_code is None else record.exit_code,
            interrupted=record.interrupted or killed,
            finished=max([record.started, *(item.time for item in members)]) if killed else record.finished,
        )
    say(f"campaign {campaign}: {tracker.num_logged} outcomes logged, {tracker.num_unchanged} already there")
    for line in (*tracker.notes, *tracker.failures):
        say(line)
    return tracker


class History:
    """A ledger read without a lock: the newest rows of every campaign."""

    def __init__(self, store: Store) -> None:
        self._folder = ledger_folder(store)
        self._parts: set[str] = set()
        self._records: dict[str, LedgerRow] = {}
        self._outcomes: dict[tuple[str, str], dict[str, LedgerRow]] = {}  # by judge_key and model, then by campaign
        self._read()

    def campaigns(self) -> list[str]:
        """Return the names of all campaigns, oldest first."""
        return sorted(self._records, key=lambda name: self._records[name].time)

    def record(self, campaign: str) -> CampaignRecord:
        """Return the record of a campaign.

        Raises:
            UsageError: there is no such campaign.
        """
        row = self._records.get(campaign)
        if row is None:
            known = ", ".join(self.campaigns()) or "none"
            raise UsageError(f"the ledger {self._folder} has no campaign {campaign!r}; it has: {known}")
        return CampaignRecord.from_json(row.data)

    def refresh(self, campaign: str) -> None:
        """Read again if the campaign has written since; call it under the campaign's lock."""
        if not {path.name for path in part_paths(self._folder, campaign)} <= self._parts:
            self._read()

    def members(self, campaign: str, record: CampaignRecord) -> list[Reached]:
        """Return the final outcomes of a campaign, in the order of the catalog."""
        until = self._records[campaign].time if record.finished is not None else float("inf")
        found = [(member, self._row(campaign, member, until)) for member in record.members]
        unfinished = {member.model for member, row in found if row is None}
        return [
            Reached(outcome=_outcome(row, cached=member.cached), time=row.time)
            for member, row in found
            if row is not None and not (member.cached and member.model in unfinished)
        ]

    def others(self, campaign: str, record: CampaignRecord) -> list[Reached]:
        """Return outcomes that only earlier starts of a campaign reached: the newest of each model and class not in its record."""
        named = {(member.model, member.device_class) for member in record.members}
        newest: dict[tuple[str, str], LedgerRow] = {}
        for rows in self._outcomes.values():
            row = rows.get(campaign)
            if row is not None and (row.model, row.device_class) not in named:
                known = newest.get((row.model, row.device_class))
                if known is None or known.time < row.time:
                    newest[row.model, row.device_class] = row
        return [Reached(outcome=_outcome(row, cached=False), time=row.time) for row in newest.values()]

    def _row(self, campaign: str, member: Member, until: float) -> LedgerRow | None:
        """Return the campaign's own row of a member; for a cached member, the newest row at that time."""
        rows = self._outcomes.get((member.judge_key, member.model), {})
        if not member.cached:
            return rows.get(campaign)
        before = [row for row in rows.values() if row.time <= until]
        return max(before, key=lambda row: row.time) if before else min(rows.values(), key=lambda row: row.time, default=None)

    def _read(self) -> None:
        paths = part_paths(self._folder)
        for row in read_rows(self._folder, kinds=("campaign", "outcome")):
            if row.kind == "campaign":
                keep_newest(self._records, row.key, row)
            elif row.kind == "outcome":
                keep_newest(self._outcomes.setdefault((row.key, row.model), {}), row.campaign, row)
        self._parts = {path.name for path in paths}


def _outcome(row: LedgerRow, *, cached: bool) -> Outcome:
    """Return the outcome of a row, cached or not as in its campaign."""
    return replace(Outcome.from_json(row.data["outcome"]), cached=cached)
