"""Parts: the files of a ledger. Each contains some rows, and never changes once it has its name.

    <campaign>@<time>-<token>.<crc>.arrow  Arrow IPC file, zstd; rows in batches of BATCH_ROWS;
                                           crc is the CRC-32 of its bytes
    <campaign>@<time>-<pid>-<n>.parquet    earlier releases, one or more rows; still read

A part is kept in memory as its compressed bytes, and a batch is decoded when the data of a row is
needed. So a large ledger takes little memory, and others may compact its files meanwhile.
"""

from __future__ import annotations

import glob
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from freezer.codec import JsonView, checked_row, frozen
from freezer.errors import IntegrityError, StoreUnreachableError
from freezer.files import make_folder, read_document, remove, retried, write_whole
from freezer.store import WORK, RemoteFiles, Store
from pipeline.records import BuildResult, Outcome

LEDGER = f"{WORK}/ledger"

SUFFIX = ".arrow"
OLD_SUFFIX = ".parquet"

BATCH_ROWS = 32
"""Rows that are compressed and decoded together."""

_HEAD = ("kind", "key", "model", "device_class", "campaign", "time")
_TEXT = "data"
_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in _HEAD[:-1]),
        ("time", pa.float64()),
        (_TEXT, pa.string()),
    ]
)

PART_BYTES = 1 << 28  # of the largest part

RowKind = Literal["build", "outcome", "campaign", "pass"]


@frozen
class LedgerRow:
    """One finished build, outcome, campaign, or pass of one over its catalog.

    Attributes:
        kind: `build`, `outcome`, `campaign` (see campaigns.py), or `pass`: the record of the
            campaign's last pass that ended. Earlier releases did not store it.
        key: build_key or judge_key, whose parts are `data["parts"]`; or the campaign's name.
        time: seconds since the epoch; increases within a campaign, and within a key.
        part, place: where its record is.
    """

    kind: RowKind
    key: str
    model: str
    device_class: str
    campaign: str
    time: float
    part: Part
    place: int

    @property
    def data(self) -> JsonView:
        """The record, decoded at each access."""
        record: JsonView = json.loads(self.part.text(self.place))
        return record

    @property
    def build(self) -> BuildResult:
        """The record of a build."""
        return BuildResult.from_row(self.key, self.data)

    @property
    def outcome(self) -> Outcome:
        """The outcome in the record of one."""
        with checked_row("outcome"):
            return Outcome.from_json(self.data["outcome"])


@contextmanager
def failing_as(problem: str) -> Iterator[None]:
    """Turn an error of the store's disk or bucket into StoreUnreachableError."""
    try:
        yield
    except OSError as error:
        raise StoreUnreachableError(f"{problem}: {error}") from error


class Part:
    """Some rows, whose records are compressed in memory.

    Attributes:
        path: of the file.
        rows: in order.

    Raises:
        pyarrow.ArrowException: the bytes are not a part.
    """

    def __init__(self, content: bytes, path: Path) -> None:
        self.path = path
        self._content = pa.py_buffer(content)
        self._batch: tuple[int, list[str]] = (-1, [])
        options = pa.ipc.IpcReadOptions(included_fields=list(range(len(_HEAD))))
        heads = pa.ipc.open_file(self._content, options=options).read_all().to_pylist()
        self.rows = [
            LedgerRow(
                **head,
                part=self,
                place=place,
            )
            for place, head in enumerate(heads)
        ]

    def text(self, place: int) -> str:
        """Return the record of a row in JSON. Its neighbours, usually needed next, are kept."""
        index, within = divmod(place, BATCH_ROWS)
        decoded = self._batch  # other threads may replace it
        if decoded[0] != index:
            batch = pa.ipc.open_file(self._content).get_batch(index)
            decoded = self._batch = index, batch.column(_TEXT).to_pylist()
        return decoded[1][within]

    def filtered(self, chosen: Callable[[LedgerRow], bool]) -> pa.Table:
        """Return the chosen rows."""
        mask = pa.array(map(chosen, self.rows), pa.bool_())
        return pa.ipc.open_file(self._content).read_all().filter(mask)


def encode(rows: Sequence[JsonView]) -> bytes:
    """Return the bytes of a part with new rows, each by the names of its columns."""
    return _encode(pa.Table.from_pylist(rows, schema=_SCHEMA))


def merged(parts: Iterable[Part], is_newest: Callable[[LedgerRow], bool]) -> bytes:
    """Return the bytes of a part with the newest rows of others."""
    return _encode(pa.concat_tables(part.filtered(is_newest) for part in parts))


def _encode(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, _SCHEMA, options=options) as writer:
        writer.write_table(table.combine_chunks(), max_chunksize=BATCH_ROWS)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def write_part(store: Store, name: str, content: bytes) -> Part:
    """Write a part for all machines. It is on the disk, or in the bucket, when this returns.

    Args:
        store: of the ledger.
        name: of the file, without checksum and suffix.
        content: of `encode` or `merged`.

    Raises:
        StoreUnreachableError: it cannot be written (a full disk); then it does not exist.
    """
    path = f"{LEDGER}/{name}.{zlib.crc32(content):08x}{SUFFIX}"
    with failing_as(f"the ledger {store.files.where(LEDGER)} cannot be written"):
        store.files.write(path, content)
    return Part(content, store.root / path)


def drop_parts(parts: Iterable[Part], store: Store) -> None:
    """Remove parts whose rows are in another part. Those of a part that remains occur twice."""
    with suppress(OSError):
        for part in parts:
            remove(part.path)
            store.files.remove(f"{LEDGER}/{part.path.name}")


def part_paths(folder: Path) -> list[Path]:
    """Return the files of a ledger's parts, sorted."""
    return sorted(chain(folder.glob(f"*{SUFFIX}"), folder.glob(f"*{OLD_SUFFIX}")))


def remove_partial(folder: Path, campaign: str) -> None:
    """Remove the partial files of killed drivers of a campaign.

    Only its current driver may call this.
    """
    name = glob.escape(campaign)
    for pattern in (f".{name}@*.partial", f".lease-{name}.json.*"):
        for path in folder.glob(pattern):
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


def read_rows(folder: Path, *kinds: RowKind) -> Iterator[LedgerRow]:
    """Yield the rows of a ledger, of some kinds or all. A row that is being compacted may occur
    twice.

    Raises:
        StoreUnreachableError: a part is damaged.
    """
    for part in read_folder(folder):
        for row in part.rows:
            if not kinds or row.kind in kinds:
                yield row


def _read(path: Path) -> Part | None:
    """Read a part; None if the file is gone."""
    try:
        content = retried(lambda: read_document(path, PART_BYTES))
        if path.suffix == OLD_SUFFIX:
            table = pq.read_table(pa.BufferReader(content), schema=_SCHEMA)
            return Part(_encode(table.select(_SCHEMA.names)), path)
        if f"{zlib.crc32(content):08x}" != path.name.split(".")[-2]:
            raise pa.ArrowInvalid("its bytes differ from those that were written")
        return Part(content, path)
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowException, IntegrityError) as error:
        raise StoreUnreachableError(
            f"{path} cannot be read: {error}; move it away to continue without its rows"
        ) from error


def mirrored(store: Store, remote: RemoteFiles) -> Path:
    """Fetch new parts, remove those that are gone from the bucket, and return the folder of the
    copy.

    Raises:
        StoreUnreachableError: the bucket cannot be read, or the folder cannot be written.
    """
    folder = store.root / LEDGER
    with failing_as(f"the ledger {remote.where(LEDGER)} cannot be read"):
        make_folder(folder)
        # First, since another process of this machine may fetch a new part.
        here = {path.name for path in part_paths(folder)}
        there = {name for name in remote.names(LEDGER) if name.endswith((SUFFIX, OLD_SUFFIX))}
        for name in sorted(there - here):
            # If its writer has merged it meanwhile, the next call finds its rows.
            with suppress(FileNotFoundError):
                content = remote.read(f"{LEDGER}/{name}", PART_BYTES)
                write_whole(folder / name, content, synced=False)
        for name in here - there:
            remove(folder / name)
    return folder
