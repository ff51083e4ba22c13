"""The ledger: the durable table of outcomes, in the store. It is the source of truth; MLflow is a
projection of it.

    STORE/.coldpress/ledger/<campaign>@....arrow   parts: some rows each, written aside, synced,
                                                   then renamed (segments.py)
    STORE/.coldpress/ledger/lease-<campaign>.json  the only driver of a campaign (lease.py)

For a store in a bucket these are objects there, and each machine has a copy of the parts
(segments.py).

A row is final once its part has its name. While a campaign runs, MERGE_AT parts of about one size
are merged into one: a folder contains some dozens of parts for any number of rows, and a row is
written two or three times. Each campaign keeps its newest row of each key, so every campaign can be
shown again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from freezer.errors import StoreUnreachableError
from freezer.files import remove
from freezer.store import WORK, Store
from pipeline.ledger.lease import Lease, LeaseLostError, campaign_lock, check_campaign
from pipeline.ledger.segments import (
    LedgerRow,
    Part,
    RowKind,
    drop_part,
    encode,
    mirrored,
    part_name,
    read_folder,
    remove_partial,
    send_part,
    write_part,
)

_Key = TypeVar("_Key")
_Timed = TypeVar("_Timed", bound="LedgerRow | _Entry")

MERGE_AT = 32
"""Number of parts of about one size that are merged."""

LEFT_ALONE = 4096
"""Rows from which a closing ledger leaves a part alone, if all others are small in comparison."""

LEAST_STEP_S = 1e-6
"""Smallest difference between the times of rows, if the clock stands still or goes back."""


def ledger_folder(store: Store) -> Path:
    """Return the folder of a store's ledger; for a bucket, of an up-to-date copy.

    Raises:
        StoreUnreachableError: the bucket cannot be read.
    """
    if store.remote is not None:
        return mirrored(store, store.remote)
    return store.root / WORK / "ledger"


class _Entry(NamedTuple):
    """Index entry of a row, which is in `part` at `place`."""

    kind: str
    key: str
    model: str
    device_class: str
    campaign: str
    time: float
    part: Part
    place: int

    def row(self) -> LedgerRow:
        head = self[:6]
        return LedgerRow(*head, self.part.text(self.place))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A row to append."""

    kind: RowKind
    key: str
    model: str
    device_class: str
    data: Mapping[str, Any]


class Ledger:
    """The ledger of a store, with this driver as the only writer of its campaign. Use it as a
    context manager.

    Args:
        store: that contains it.
        campaign: to write for.
        notify: takes messages about the wait for another driver.
        read_only: take no lease. It can then be read while the campaign's driver runs, and not be
            written.

    Raises:
        UsageError: the campaign's name is not allowed.
    """

    def __init__(
        self,
        store: Store,
        campaign: str,
        notify: Callable[[str], None] = lambda _: None,
        *,
        read_only: bool = False,
    ) -> None:
        check_campaign(campaign)
        self._store = store
        self._remote = store.remote
        self.folder = ledger_folder(store)
        self.campaign = campaign
        self._notify = notify
        self._read_only = read_only
        # By kind and key, then by model.
        self._of_keys: dict[tuple[str, str], dict[str, _Entry]] = {}
        self._nearest: dict[tuple[str, str, str], _Entry] = {}  # by kind, model and device class
        self._own: dict[tuple[str, str, str], _Entry] = {}  # by kind, key and model
        self._own_parts: list[Part] = []
        self._known: set[Path] = set()
        self._words: dict[str, str] = {}
        self._latest = 0.0
        self._num_written = 0
        self._lease: Lease | None = None
        self._held = ExitStack()

    def __enter__(self) -> Ledger:
        """Take the campaign's lease and read everything.

        Raises:
            InfrastructureError: another driver runs this campaign.
            StoreUnreachableError: the ledger cannot be read or written.
        """
        if self._read_only:
            self.refresh()
            return self
        with ExitStack() as stack:
            lock = campaign_lock(self.folder, self.campaign, self._notify, remote=self._remote)
            self._lease = stack.enter_context(lock)
            remove_partial(self.folder, self.campaign)
            self.refresh()
            self._held = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        if self._read_only:
            return
        # Rows are safe in many parts too: if they cannot be merged now, the next start does it.
        with self._held, suppress(LeaseLostError, StoreUnreachableError):
            parts = sorted(self._own_parts, key=lambda part: part.num_rows)
            others = sum(part.num_rows for part in parts[:-1])
            if parts and parts[-1].num_rows > max(LEFT_ALONE, MERGE_AT * others):
                parts.pop()
            if len(parts) > 1:
                self._merge(parts)

    @property
    def unended_since(self) -> float | None:
        """Start of the campaign's last driver if it died; see Lease.after."""
        return None if self._lease is None else self._lease.after

    def check(self) -> None:
        """Check that this driver may still write for its campaign.

        Raises:
            LeaseLostError: another driver has taken over.
            StoreUnreachableError: the lease cannot be read.
        """
        if self._lease is None:
            raise RuntimeError("the ledger is not open, or read-only")
        self._lease.check()

    def refresh(self) -> None:
        """Read the rows that other campaigns have written since.

        Raises:
            StoreUnreachableError: a part is damaged.
        """
        if self._remote is not None:
            mirrored(self._store, self._remote)
        own = f"{self.campaign}@"
        for part in read_folder(self.folder, self._known):
            if part.path is not None:
                self._known.add(part.path)
                if part.path.name.startswith(own):
                    self._own_parts.append(part)
            self._take_in(part)

    def find(self, kind: RowKind, key: str, *, model: str | None = None) -> LedgerRow | None:
        """Return the newest row of a key, optionally of one model: entries that differ only in name
        share a key.
        """
        entries = self._of_keys.get((kind, key), {})
        if model is None:
            return max(entries.values(), key=lambda entry: entry.time).row() if entries else None
        return entries[model].row() if model in entries else None

    def rows(self, kind: RowKind) -> Iterator[LedgerRow]:
        """Yield the newest row of each key and model, the oldest first."""
        entries: list[_Entry] = []
        for (of_kind, _), by_model in self._of_keys.items():
            if of_kind == kind:
                entries += by_model.values()
        return (entry.row() for entry in sorted(entries, key=lambda entry: entry.time))

    def own(self, kind: RowKind, key: str, model: str) -> LedgerRow | None:
        """Return the newest row of a key and model that this campaign wrote itself."""
        entry = self._own.get((kind, key, model))
        return None if entry is None else entry.row()

    def nearest(self, kind: RowKind, model: str, device_class: str) -> LedgerRow | None:
        """Return the newest row of a model and device class, with any key."""
        entry = self._nearest.get((kind, model, device_class))
        return None if entry is None else entry.row()

    def append(
        self, kind: RowKind, key: str, *, model: str, device_class: str, data: Mapping[str, Any]
    ) -> None:
        """Add a row, which is on the disk when this returns.

        Raises:
            LeaseLostError: another driver has taken the campaign over.
            StoreUnreachableError: it cannot be written (a full disk); nothing was added.
        """
        draft = Draft(kind=kind, key=key, model=model, device_class=device_class, data=data)
        self.append_all([draft])

    def append_all(self, drafts: Sequence[Draft]) -> None:
        """Add rows atomically. They are on the disk when this returns.

        Raises:
            LeaseLostError: another driver has taken the campaign over.
            StoreUnreachableError: they cannot be written (a full disk); nothing was added.
        """
        if not drafts:
            return
        self.check()
        rows = [self._row(draft) for draft in drafts]
        self._add_own(self._written(encode(rows)))
        # The rows are written; the next append reports a problem.
        with suppress(LeaseLostError, StoreUnreachableError):
            self._merge_steps()

    def _row(self, draft: Draft) -> LedgerRow:
        """Return the row, with a later time than every row that it replaces, even if the clock went
        back.
        """
        known = self._of_keys.get((draft.kind, draft.key), {}).get(draft.model)
        before = max(self._latest, known.time if known else 0.0)
        self._latest = max(time.time(), before + LEAST_STEP_S)
        head = (draft.kind, draft.key, draft.model, draft.device_class)
        return LedgerRow(*head, self.campaign, self._latest, json.dumps(draft.data))

    def _name(self) -> str:
        self._num_written += 1
        token = self._lease.token[:8] if self._lease else ""
        return f"{self.campaign}@{time.time_ns()}-{token}-{self._num_written}"

    def _add_own(self, part: Part) -> None:
        if part.path is not None:
            self._known.add(part.path)
        self._own_parts.append(part)
        self._take_in(part)

    def _take_in(self, part: Part) -> None:
        """Index the rows of a part. Texts that many rows share are stored once."""
        words = self._words
        for index, (key, at, *shared) in enumerate(part.heads()):
            kind, model, device_class, campaign = (words.setdefault(word, word) for word in shared)
            entry = _Entry(kind, key, model, device_class, campaign, at, part, index)
            keep_newest(self._of_keys.setdefault((kind, key), {}), model, entry)
            keep_newest(self._nearest, (kind, model, device_class), entry)
            if campaign == self.campaign:
                keep_newest(self._own, (kind, key, model), entry)
                self._latest = max(self._latest, at)

    def _merge_steps(self) -> None:
        """Merge parts of one size, then of the next, as long as there are enough."""
        level = 0
        while True:
            alike = [part for part in self._own_parts if _level(part) == level]
            if len(alike) < MERGE_AT:
                return
            self._merge(alike)
            level += 1

    def _merge(self, parts: Sequence[Part]) -> None:
        """Merge parts into one, without replaced rows.

        Readers see the old parts, the new one, or both.
        """
        self.check()
        merged = self._written(encode(self._newest_rows(parts)))
        self._own_parts = [part for part in self._own_parts if part not in parts]
        self._add_own(merged)
        for part in parts:
            if part.path is not None:
                with suppress(OSError):  # then its rows occur twice
                    remove(part.path)
                if self._remote is not None:
                    drop_part(self._remote, part.path.name)

    def _written(self, content: bytes) -> Part:
        if self._remote is None:
            return write_part(self.folder, self._name(), content)
        name = part_name(self._name(), content)
        send_part(self._remote, name, content)
        return Part(content, self.folder / name)

    def _newest_rows(self, parts: Sequence[Part]) -> Iterator[LedgerRow]:
        for part in parts:
            for index, row in enumerate(part.rows()):
                newest = self._own[row.kind, row.key, row.model]
                if newest.part is part and newest.place == index:
                    yield row


def _level(part: Part) -> int:
    """Return 0 for a part with few rows, 1 for one merged from MERGE_AT of them, and so on."""
    level = 0
    rows = part.num_rows
    while rows >= MERGE_AT:
        level = level + 1
        rows = rows // MERGE_AT
    return level


def keep_newest(rows: dict[_Key, _Timed], key: _Key, row: _Timed) -> None:
    """Store a row under its key, unless there is a newer one."""
    known = rows.get(key)
    if known is None or known.time <= row.time:
        rows[key] = row
