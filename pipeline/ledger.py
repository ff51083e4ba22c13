"""The ledger: the durable table of outcomes, in the store. It is the truth; MLflow is a projection of it.

    STORE/.coldpress/ledger/<campaign>@<time>-<pid>-<n>.parquet    one append each: written aside, synced, then renamed
    STORE/.coldpress/ledger/lock-<campaign>                          held by the one driver of a campaign

A row is final once its file has its name. Parts are compacted into one when a campaign ends; the newest row of each key of each
campaign stays, so that every campaign can be shown again as it was.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from freezer.artifact import fsync_file
from freezer.errors import InfrastructureError, StoreUnreachableError
from freezer.store import WORK, Store

_Key = TypeVar("_Key")

COMPACT_ABOVE = 32
"""Parts from which a closing ledger makes one."""

_SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("key", pa.string()),
        ("model", pa.string()),
        ("device_class", pa.string()),
        ("campaign", pa.string()),
        ("time", pa.float64()),
        ("data", pa.string()),
    ]
)

Kind = Literal["build", "outcome", "campaign"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One thing that is finished.

    Attributes:
        kind: `build`, `outcome`, or `campaign` (see campaign_record.py).
        key: build_key or judge_key, `data["parts"]` are its parts; or the campaign's name.
        time: seconds since the epoch.
        data: the record, as JSON holds it.
    """

    kind: Kind
    key: str
    model: str
    device_class: str
    campaign: str
    time: float
    data: Mapping[str, Any]


def ledger_folder(store: Store) -> Path:
    """Where the ledger of a store lies."""
    return store.root / WORK / "ledger"


@contextmanager
def campaign_lock(folder: Path, campaign: str) -> Iterator[None]:
    """The right to write for a campaign, which one process at a time has; a process that dies gives it back.

    Raises:
        InfrastructureError: another process has it.
        StoreUnreachableError: the lock's file cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f"lock-{campaign}").open("a")
    except OSError as error:
        raise StoreUnreachableError(f"the ledger {folder} cannot be opened: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InfrastructureError(
                f"campaign {campaign!r} is being run by another driver on {folder}; wait for it, or name another with --campaign",
                code="CP-CAMPAIGN-RUNNING",
            ) from None
        yield


def read_parts(paths: Iterable[Path], *, kinds: Collection[Kind] = KINDS) -> Iterator[Row]:
    """The rows of some parts, of some kinds.

    Raises:
        StoreUnreachableError: a part is damaged.
    """
    for path in paths:
        try:
            table = pq.read_table(path, schema=_SCHEMA)
        except FileNotFoundError:
            continue  # another campaign's driver has just compacted it away
        except (OSError, pa.ArrowException) as error:
            raise StoreUnreachableError(f"{path} cannot be read: {error}; move it away to go on without its rows") from error
        for record in table.filter(pc.is_in(table["kind"], pa.array(kinds, pa.string()))).to_pylist():
            yield Row(**{**record, "data": json.loads(record["data"])})


class Ledger:
    """The ledger of a store, with this driver as the one writer of its campaign. Use it as a context manager."""

    def __init__(self, store: Store, campaign: str) -> None:
        self.folder = ledger_folder(store)
        self.campaign = campaign
        self._rows: dict[tuple[str, str], Row] = {}
        self._of_models: dict[tuple[str, str, str], Row] = {}
        self._own: dict[tuple[str, str, str], Row] = {}
        self._num_appended = 0
        self._held = ExitStack()

    def __enter__(self) -> Ledger:
        """Take the campaign's lock and read everything.

        Raises:
            InfrastructureError: another driver runs this campaign.
            StoreUnreachableError: the ledger cannot be read or made.
        """
        with ExitStack() as held:
            held.enter_context(campaign_lock(self.folder, self.campaign))
            for row in read_parts(sorted(self.folder.glob("*.parquet"))):
                self._keep(row)
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._held:
            self._compact()

    def find(self, kind: Kind, key: str, *, model: str | None = None) -> Row | None:
        """The newest row of a key; of one model, where entries that are the same but for their names share it."""
        return self._rows.get((kind, key)) if model is None else self._of_models.get((kind, key, model))

    def nearest(self, kind: Kind, model: str, device_class: str) -> Row | None:
        """The newest row of a model and device class, whatever its key."""
        rows = [r for r in self._rows.values() if (r.kind, r.model, r.device_class) == (kind, model, device_class)]
        return max(rows, key=lambda row: row.time, default=None)

    def append(self, kind: Kind, key: str, *, model: str, device_class: str, data: Mapping[str, Any]) -> Row:
        """Add a row; when this returns it is on the disk.

        Raises:
            StoreUnreachableError: it cannot be written (a full disk); nothing was added.
        """
        row = Row(kind=kind, key=key, model=model, device_class=device_class, campaign=self.campaign, time=time.time(), data=data)
        self._num_appended += 1
        self._write([row], f"{self.campaign}@{time.time_ns()}-{os.getpid()}-{self._num_appended}.parquet")
        self._keep(row)
        return row

    def _keep(self, row: Row) -> None:
        identity = (row.kind, row.key, row.model)
        keep_newest(self._rows, (row.kind, row.key), row)
        keep_newest(self._of_models, identity, row)
        if row.campaign == self.campaign:
            keep_newest(self._own, identity, row)

    def _write(self, rows: Iterable[Row], name: str) -> None:
        columns: dict[str, list[Any]] = {field: [] for field in _SCHEMA.names}
        for row in rows:
            for field in _SCHEMA.names:
                columns[field].append(json.dumps(row.data) if field == "data" else getattr(row, field))
        partial = self.folder / f".{name}.partial"
        try:
            pq.write_table(pa.table(columns, schema=_SCHEMA), partial)
            fsync_file(partial)
            os.replace(partial, self.folder / name)
            fsync_file(self.folder)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise StoreUnreachableError(f"the ledger {self.folder} cannot be written: {error}") from error

    def _compact(self) -> None:
        """Make one part of this campaign's many. Readers see either form; a row that is in both is the same row."""
        mine = sorted(self.folder.glob(f"{self.campaign}@*.parquet"))
        if len(mine) < COMPACT_ABOVE:
            return
        self._write(self._own.values(), f"{self.campaign}@{time.time_ns()}-{os.getpid()}-0.parquet")
        for path in mine:
            path.unlink(missing_ok=True)


def keep_newest(rows: dict[_Key, Row], key: _Key, row: Row) -> None:
    """Put a row under its key, unless a newer one is there."""
    known = rows.get(key)
    if known is None or known.time <= row.time:
        rows[key] = row
