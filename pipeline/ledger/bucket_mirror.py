"""This machine's copy of a ledger in a bucket.

Parts never change, so a copy is complete or absent.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from freezer.errors import StoreUnreachableError
from freezer.store import WORK, RemoteFiles, Store
from pipeline.ledger.segments import OLD_SUFFIX, SUFFIX

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
        StoreUnreachableError: it cannot be written; then there is no part.
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
        remote.fetch(f"{LEDGER}/{name}", partial)
        os.replace(partial, folder / name)
    except FileNotFoundError:
        pass
    finally:
        partial.unlink(missing_ok=True)
