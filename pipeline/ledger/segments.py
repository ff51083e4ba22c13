"""Parts: the files of a ledger. Each contains some rows, and never changes once it has its name.

    <campaign>@<time>-<token>-<n>.<crc>.arrow  Arrow IPC file, zstd; rows in batches of BATCH_ROWS;
                                               crc is the CRC-32 of its bytes
    <campaign>@<time>-<pid>-<n>.parquet        earlier releases, one or more rows; still read

A part is kept in memory as its compressed bytes, and a batch is decoded when the data of a row is
needed. So a large ledger takes little memory, and others may compact its files meanwhile.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from freezer.errors import IntegrityError, StoreUnreachableError
from freezer.files import read_document, remove, retried, write_whole
from freezer.store import WORK, RemoteFiles, Store

SUFFIX = ".arrow"
OLD_SUFFIX = ".parquet"

BATCH_ROWS = 32
"""Rows that are compressed and decoded together."""

_TEXTS = ("kind", "key", "model", "device_class", "campaign")
_SCHEMA = pa.schema(
    [*((n, pa.string()) for n in _TEXTS), ("time", pa.float64()), ("data", pa.string())]
)
_HEAD = ["key", "time", "kind", "model", "device_class", "campaign"]
_DATA = "data"

PART_BYTES = 1 << 28  # of the largest part

RowKind = Literal["build", "outcome", "campaign"]
KINDS: tuple[RowKind, ...] = get_args(RowKind)


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One finished build, outcome or campaign.

    Attributes:
        kind: `build`, `outcome`, or `campaign` (see campaign_record.py).
        key: build_key or judge_key, whose parts are `data["parts"]`; or the campaign's name.
        time: seconds since the epoch; increases within a campaign, and within a key.
        text: the record in JSON.
    """

    kind: RowKind
    key: str
    model: str
    device_class: str
    campaign: str
    time: float
    text: str

    @property
    def data(self) -> Mapping[str, Any]:
        """The record, decoded at each access."""
        record: Mapping[str, Any] = json.loads(self.text)
        return record


class Part:
    """Some rows, compressed in memory.

    Raises:
        pyarrow.ArrowException: the bytes are not a part.
    """

    def __init__(self, content: bytes, path: Path | None) -> None:
        self.path = path
        self._content = pa.py_buffer(content)
        self._batch: tuple[int, list[str]] = (-1, [])
        self.num_rows = sum(batch.num_rows for batch in self._batches(["time"]))

    def heads(self) -> Iterator[tuple[Any, ...]]:
        """Yield key, time, kind, model, device class and campaign of each row, in order."""
        for batch in self._batches(_HEAD):
            columns = [batch.column(name).to_pylist() for name in _HEAD]
            yield from zip(*columns, strict=True)

    def text(self, row: int) -> str:
        """Return the record of a row in JSON."""
        index, within = divmod(row, BATCH_ROWS)
        if self._batch[0] == index:
            return self._batch[1][within]
        batch = pa.ipc.open_file(self._content).get_batch(index)
        texts: list[str] = batch.column(_DATA).to_pylist()
        if self.num_rows > BATCH_ROWS:  # neighbours are usually needed next
            self._batch = (index, texts)
        return texts[within]

    def rows(self) -> Iterator[LedgerRow]:
        """Yield every row, in order."""
        for batch in self._batches(_SCHEMA.names):
            columns = [column.to_pylist() for column in batch.columns]
            yield from map(LedgerRow, *columns)

    def _batches(self, names: list[str]) -> Iterator[pa.RecordBatch]:
        fields = [_SCHEMA.get_field_index(name) for name in names]
        options = pa.ipc.IpcReadOptions(included_fields=fields)
        reader = pa.ipc.open_file(self._content, options=options)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)


def encode(rows: Iterable[LedgerRow]) -> bytes:
    """Return the bytes of a part, with rows in batches of BATCH_ROWS."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, _SCHEMA, options=options) as writer:
        waiting = iter(rows)
        while batch := list(islice(waiting, BATCH_ROWS)):
            columns = zip(*map(astuple, batch), strict=True)
            writer.write_batch(pa.record_batch(list(map(list, columns)), schema=_SCHEMA))
    content: bytes = sink.getvalue().to_pybytes()
    return content


def part_name(name: str, content: bytes) -> str:
    """Return the file name of a part, which includes the checksum of its content."""
    return f"{name}.{zlib.crc32(content):08x}{SUFFIX}"


def write_part(folder: Path, name: str, content: bytes) -> Part:
    """Write a part, which is on the disk when this returns.

    Args:
        folder: of the ledger.
        name: of the file, without checksum and suffix.
        content: of `encode`.

    Raises:
        StoreUnreachableError: it cannot be written (a full disk); then there is no file.
    """
    path = folder / part_name(name, content)
    try:
        write_whole(path, content)
    except OSError as error:
        raise StoreUnreachableError(f"the ledger {folder} cannot be written: {error}") from error
    return Part(content, path)


def part_paths(folder: Path, campaign: str | None = None) -> list[Path]:
    """Return the files of a ledger's parts, of all campaigns or of one, sorted."""
    mine = "*" if campaign is None else f"{glob.escape(campaign)}@*"
    new = folder.glob(f"{mine}{SUFFIX}")
    old = folder.glob(f"{mine}{OLD_SUFFIX}")
    return sorted((*new, *old))


def remove_partial(folder: Path, campaign: str) -> None:
    """Remove the partial files of killed drivers of a campaign.

    Only its current driver may call this.
    """
    for path in folder.glob(f".{glob.escape(campaign)}@*.partial"):
        remove(path)
    for path in folder.glob(f".lease-{glob.escape(campaign)}.json.*"):
        remove(path)


def read_folder(folder: Path, known: Collection[Path] = ()) -> Iterator[Part]:
    """Yield the parts of a ledger that are not known yet. Rows that others compact meanwhile are
    found in their new parts.

    Raises:
        StoreUnreachableError: a part is damaged.
    """
    seen = set(known)
    missing = True
    while missing:
        missing = False
        for path in part_paths(folder):
            if path in seen:
                continue
            seen.add(path)
            part = _read(path)
            if part is None:
                missing = True
            else:
                yield part


def read_rows(folder: Path, *, kinds: Collection[RowKind] = KINDS) -> Iterator[LedgerRow]:
    """Yield the rows of a ledger, of some kinds. A row that is being compacted may occur twice.

    Raises:
        StoreUnreachableError: a part is damaged.
    """
    for part in read_folder(folder):
        for row in part.rows():
            if row.kind in kinds:
                yield row


def _read(path: Path) -> Part | None:
    """Read a part; None if the file is gone."""
    try:
        content = retried(lambda: read_document(path, PART_BYTES))
        if path.suffix == OLD_SUFFIX:
            table = pq.read_table(pa.BufferReader(content), schema=_SCHEMA)
            columns = [table.column(name).to_pylist() for name in _SCHEMA.names]
            return Part(encode(map(LedgerRow, *columns)), path)
        if f"{zlib.crc32(content):08x}" != path.name.split(".")[-2]:
            raise pa.ArrowInvalid("its bytes differ from those that were written")
        return Part(content, path)
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowException, IntegrityError) as error:
        raise StoreUnreachableError(
            f"{path} cannot be read: {error}; move it away to continue without its rows"
        ) from error


LEDGER = f"{WORK}/ledger"


def mirrored(store: Store, remote: RemoteFiles) -> Path:
    """Fetch new parts, remove those that are gone from the bucket, and return the folder of the
    copy.

    Raises:
        StoreUnreachableError: the bucket cannot be read, or the folder cannot be written.
    """
    folder = store.root / LEDGER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # First, since another process of this machine may fetch a new part.
        here = set(_parts(path.name for path in folder.iterdir()))
        there = set(_parts(remote.names(LEDGER)))
        for name in sorted(there - here):
            _fetch(remote, name, folder)
        for name in here - there:
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise StoreUnreachableError(
            f"the ledger {remote.where(LEDGER)} cannot be read: {error}"
        ) from error
    return folder


def send_part(remote: RemoteFiles, name: str, content: bytes) -> None:
    """Write a part for all machines.

    Raises:
        StoreUnreachableError: it cannot be written, and does not exist.
    """
    with _writing(remote):
        remote.write(f"{LEDGER}/{name}", content)


def drop_part(remote: RemoteFiles, name: str) -> None:
    """Remove a part whose rows are in another part.

    Raises:
        StoreUnreachableError: the bucket cannot be written.
    """
    with _writing(remote):
        remote.remove(f"{LEDGER}/{name}")


@contextlib.contextmanager
def _writing(remote: RemoteFiles) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreUnreachableError(
            f"the ledger {remote.where(LEDGER)} cannot be written: {error}"
        ) from error


def _parts(names: Iterable[str]) -> list[str]:
    parts = [name for name in names if name.endswith((SUFFIX, OLD_SUFFIX))]
    return [name for name in parts if not name.startswith(".")]


def _fetch(remote: RemoteFiles, name: str, folder: Path) -> None:
    """Fetch one part.

    If its writer has merged it meanwhile, its rows are in a part that the next call finds.
    """
    partial = folder / f".{name}.{os.getpid()}"
    try:
        remote.fetch(f"{LEDGER}/{name}", partial, PART_BYTES)
        os.replace(partial, folder / name)
    except FileNotFoundError:
        pass
    finally:
        partial.unlink(missing_ok=True)
