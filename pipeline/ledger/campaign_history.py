"""The history of a store: its campaigns and their outcomes, read from the ledger without a lock.

A campaign shows the outcomes that its record names. A killed campaign shows its own final outcomes,
and cached outcomes of models whose outcomes are all final.
"""

from __future__ import annotations

from dataclasses import replace

from freezer.codec import frozen
from freezer.errors import UsageError
from freezer.store import Store
from pipeline.ledger.campaign_record import CampaignRecord, Member
from pipeline.ledger.ledger import keep_newest, ledger_folder
from pipeline.ledger.segments import LedgerRow, part_paths, read_rows
from pipeline.records import Outcome


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
        self._parts: set[str] = set()
        self._keys: dict[str, set[str]] = {}  # judge_keys by model
        self._records: dict[str, LedgerRow] = {}
        self._passes: dict[str, LedgerRow] = {}  # of those that ended, the last
        # By judge_key and model, then by campaign.
        self._outcomes: dict[tuple[str, str], dict[str, LedgerRow]] = {}
        self._decoded: dict[LedgerRow, Outcome] = {}
        self._read()

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

    def refresh(self, campaign: str) -> None:
        """Read again if the campaign has written since; call it under the campaign's lock."""
        if not {path.name for path in part_paths(self.folder, campaign)} <= self._parts:
            self._read()

    def members(self, campaign: str, record: CampaignRecord) -> list[Reached]:
        """Return the final outcomes of a campaign, in the order of the catalog."""
        until = record.finished if record.finished is not None else float("inf")
        rows = [self._row(campaign, member, until) for member in record.members]
        pairs = list(zip(record.members, rows, strict=True))
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
        rows: list[LedgerRow] = []
        for key in self._keys.get(model, ()):
            rows += self._outcomes[key, model].values()
        return [self._reached(row) for row in sorted(rows, key=lambda row: row.time)]

    def models(self) -> list[str]:
        """Return the names of all models with an outcome, sorted."""
        return sorted(self._keys)

    def others(self, campaign: str, record: CampaignRecord) -> list[Reached]:
        """Return outcomes that only earlier starts of a campaign reached: the newest of each model
        and class not in its record.
        """
        named = {(member.model, member.device_class) for member in record.members}
        newest: dict[tuple[str, str], LedgerRow] = {}
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
        return min(
            rows.values(),
            key=lambda row: row.time,
            default=None,
        )

    def _read(self) -> None:
        paths = part_paths(self.folder)
        for row in read_rows(self.folder, kinds=("campaign", "pass", "outcome")):
            if row.kind != "outcome":
                keep_newest(self._records if row.kind == "campaign" else self._passes, row.key, row)
            else:
                of_key = self._outcomes.setdefault((row.key, row.model), {})
                keep_newest(of_key, row.campaign, row)
                self._keys.setdefault(row.model, set()).add(row.key)
        self._parts = {path.name for path in paths}

    def _reached(self, row: LedgerRow, *, cached: bool = False) -> Reached:
        """The outcome of a row, cached or not as in its campaign. A page reads each twice."""
        outcome = self._decoded.get(row)
        if outcome is None:
            outcome = self._decoded[row] = row.outcome
        return Reached(
            outcome=replace(outcome, cached=cached),
            time=row.time,
        )
