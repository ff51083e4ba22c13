"""The ledger: the durable table of outcomes, in the store. It is the source of truth; MLflow is a
projection of it.

    STORE/.coldpress/ledger/<campaign>@....arrow   parts: some rows each, written aside, synced,
                                                   then renamed (segments.py)
    STORE/.coldpress/ledger/lease-<campaign>.json  the only driver of a campaign (lease.py)

For a store in a bucket these are objects there, and each machine has a copy of the parts
(segments.py).

A row is final once its part has its name. While a campaign runs, MERGE_AT small parts are merged
into one, so a folder contains some dozens of parts for any number of rows. Each campaign keeps its
newest row of each key, so every campaign can be shown again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from freezer.codec import Json, JsonView
from freezer.errors import StoreUnreachableError, UsageError
from freezer.files import OCI
from freezer.store import Store
from pipeline.ledger.lease import Lease, LeaseLostError, campaign_lock, check_campaign
from pipeline.ledger.segments import (
    LEDGER,
    LedgerRow,
    Part,
    RowKind,
    drop_parts,
    encode,
    merged,
    mirrored,
    read_folder,
    remove_partial,
    write_part,
)
from pipeline.records import Note

_Key = TypeVar("_Key")

MERGE_AT = 32
"""Number of small parts that are merged while a campaign runs."""

LEFT_ALONE = 1024
"""Rows from which a part is left alone."""

LEAST_STEP_S = 1e-6
"""Smallest difference between the times of rows, if the clock stands still or goes back."""


def ledger_folder(store: Store) -> Path:
    """Return the folder of a store's ledger; for a bucket, of an up-to-date copy.

    Raises:
        StoreUnreachableError: the bucket cannot be read.
        UsageError: the store is a registry.
    """
    refuse_registry(store.uri)
    if store.remote is not None:
        return mirrored(store, store.remote)
    return store.root / LEDGER


def refuse_registry(uri: str) -> None:
    """Refuse the URI of a store without a ledger.

    Raises:
        UsageError: it is a registry.
    """
    place = uri.partition("?")[0]
    if urlsplit(uri).scheme == OCI:
        raise UsageError(
            f"store {place}: a registry holds published versions, and campaigns need a place for"
            " their ledger and candidates; use a folder, s3:// or gs:// as --store, then"
            f" `coldpress copy STORE {place}`"
        )


class Draft(NamedTuple):
    """A row to append."""

    kind: RowKind
    key: str
    model: str
    device_class: str
    data: JsonView


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
        notify: Note = lambda _: None,
        *,
        read_only: bool = False,
    ) -> None:
        check_campaign(campaign)
        self._store = store
        self.folder = ledger_folder(store)
        self.campaign = campaign
        self._notify = notify
        self._read_only = read_only
        # By kind and key, then by model.
        self._of_keys: dict[tuple[str, str], dict[str, LedgerRow]] = {}
        self._nearest: dict[tuple[str, str, str], LedgerRow] = {}  # by kind, model, device class
        self._own: dict[tuple[str, str, str], LedgerRow] = {}  # by kind, key and model
        self._own_parts: list[Part] = []
        self._known: set[Path] = set()
        self._latest = 0.0
        self._lease: Lease | None = None
        self._held = ExitStack()

    def __enter__(self) -> Ledger:
        """Take the campaign's lease and read everything.

        Raises:
            InfrastructureError: another driver runs this campaign.
            StoreUnreachableError: the ledger cannot be read or written.
        """
        with ExitStack() as stack:
            if not self._read_only:
                lock = campaign_lock(self._store, self.campaign, self._notify)
                self._lease = stack.enter_context(lock)
                remove_partial(self.folder, self.campaign)
            self.refresh()
            self._held = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        # Rows are safe in many parts too: if they cannot be merged now, the next start does it.
        with self._held, suppress(LeaseLostError, StoreUnreachableError):
            if self._lease is not None:
                self._merge_small(2)

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
        assert self._lease is not None
        self._lease.check()

    def refresh(self) -> None:
        """Read the rows that other campaigns have written since.

        Raises:
            StoreUnreachableError: a part is damaged.
        """
        ledger_folder(self._store)
        for part in read_folder(self.folder, self._known):
            self._take_in(part)

    def find(
        self,
        kind: RowKind,
        key: str,
        *,
        model: str | None = None,
    ) -> LedgerRow | None:
        """Return the newest row of a key, optionally of one model: entries that differ only in name
        share a key.
        """
        rows = self._of_keys.get((kind, key), {})
        if model is None:
            return max(rows.values(), key=lambda row: row.time, default=None)
        return rows.get(model)

    def rows(self, kind: RowKind) -> list[LedgerRow]:
        """Return the newest row of each key and model, the oldest first."""
        rows = [row for by_model in self._of_keys.values() for row in by_model.values()]
        return sorted((row for row in rows if row.kind == kind), key=lambda row: row.time)

    def own(
        self,
        kind: RowKind,
        key: str,
        model: str,
    ) -> LedgerRow | None:
        """Return the newest row of a key and model that this campaign wrote itself."""
        return self._own.get((kind, key, model))

    def nearest(
        self,
        kind: RowKind,
        model: str,
        device_class: str,
    ) -> LedgerRow | None:
        """Return the newest row of a model and device class, with any key."""
        return self._nearest.get((kind, model, device_class))

    def append(
        self,
        kind: RowKind,
        key: str,
        *,
        model: str,
        device_class: str,
        data: JsonView,
    ) -> None:
        """Add a row, which is on the disk when this returns.

        Raises:
            LeaseLostError: another driver has taken the campaign over.
            StoreUnreachableError: it cannot be written (a full disk); nothing was added.
        """
        self.append_all([Draft(kind, key, model, device_class, data)])

    def append_all(self, drafts: Sequence[Draft]) -> None:
        """Add rows atomically. They are on the disk when this returns.

        Raises:
            LeaseLostError: another driver has taken the campaign over.
            StoreUnreachableError: they cannot be written (a full disk); nothing was added.
        """
        if not drafts:
            return
        self.check()
        self._write(encode([self._row(draft) for draft in drafts]))
        # The rows are written; the next append reports a problem.
        with suppress(LeaseLostError, StoreUnreachableError):
            self._merge_small(MERGE_AT)

    def _row(self, draft: Draft) -> Json:
        """Return the row, with a later time than every known one, even if the clock went back."""
        self._latest = max(time.time(), self._latest + LEAST_STEP_S)
        own = {"campaign": self.campaign, "time": self._latest, "data": json.dumps(draft.data)}
        return {**draft._asdict(), **own}

    def _write(self, content: bytes) -> None:
        token = self._lease.token[:8] if self._lease else ""
        name = f"{self.campaign}@{time.time_ns()}-{token}"
        self._take_in(write_part(self._store, name, content))

    def _take_in(self, part: Part) -> None:
        """Index the rows of a part."""
        self._known.add(part.path)
        if part.path.name.startswith(f"{self.campaign}@"):
            self._own_parts.append(part)
        for row in part.rows:
            keep_newest(self._of_keys.setdefault((row.kind, row.key), {}), row.model, row)
            keep_newest(self._nearest, (row.kind, row.model, row.device_class), row)
            self._latest = max(self._latest, row.time)
            if row.campaign == self.campaign:
                keep_newest(self._own, (row.kind, row.key, row.model), row)

    def _merge_small(self, at_least: int) -> None:
        """Merge the small parts into one, without replaced rows, if there are as many.

        Readers see the old parts, the new one, or both.
        """
        small = [part for part in self._own_parts if len(part.rows) < LEFT_ALONE]
        if len(small) < at_least:
            return
        self.check()
        content = merged(small, lambda row: self.own(row.kind, row.key, row.model) is row)
        self._own_parts = [part for part in self._own_parts if part not in small]
        self._write(content)
        drop_parts(small, self._store)


def keep_newest(rows: dict[_Key, LedgerRow], key: _Key, row: LedgerRow) -> None:
    """Store a row under its key, unless there is a newer one."""
    known = rows.get(key)
    if known is None or known.time <= row.time:
        rows[key] = row
