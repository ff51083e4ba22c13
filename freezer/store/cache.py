"""The cache of blobs of this user: verified copies of what buckets and registries hold, since
payloads are mapped into memory from local files. Imports no torch.

    CACHE/blobs/sha256/HEX     complete blobs and documents, read-only
    CACHE/partial/HEX          an unfinished download; its lock lets one process download at a time

Only its user can read it. Users may delete files at any time; the least recently used are deleted
where it grows beyond its limit.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedRandom
from pathlib import Path

from freezer.errors import IntegrityError, StoreUnreachableError, UsageError
from freezer.files import (
    CHANGED,
    RemoteError,
    cache_folder,
    digest_bytes,
    make_folder,
    move,
    verify_file,
    write_whole,
)
from freezer.progress import transferred

LIMIT = "COLDPRESS_CACHE_BYTES"
"""Environment variable with the limit of the cache."""

LIMIT_BYTES = 50_000_000_000
_NUM_TRIES = 50
"""Attempts at a download while others delete the cache."""


class BlobCache:
    """The cache, as one store of this process uses it.

    Raises:
        UsageError: its limit is not a number.
    """

    def __init__(self) -> None:
        text = os.environ.get(LIMIT) or str(LIMIT_BYTES)
        if not text.isdecimal():
            raise UsageError(f"{LIMIT}={text!r}: expected a number of bytes")
        self._root, self._limit_bytes = cache_folder(), int(text)
        self._verified: dict[str, tuple[int, int, int]] = {}

    def path(self, digest: str) -> Path:
        """Where the cache keeps a blob, also one that it lacks."""
        return self._root / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def find(self, digest: str, size_bytes: int | None = None) -> Path | None:
        """A verified copy; None without an undamaged one."""
        copy = self.path(digest)
        try:
            status = copy.stat()
            if self._verified.get(digest) != _identity(status):
                size = status.st_size if size_bytes is None else size_bytes
                verify_file(copy, digest=digest, size_bytes=size)
                os.utime(copy)
                self._verified[digest] = _identity(copy.stat())
        except (IntegrityError, OSError):
            return None
        return copy

    def document(self, digest: str, read: Callable[[], bytes]) -> bytes:
        """The content of a small blob, read where the cache lacks it; the caller verifies it."""
        with suppress(OSError):
            copy = self.find(digest)
            if copy is not None:
                return copy.read_bytes()
        data = read()
        if digest_bytes(data) == digest:
            with suppress(OSError):  # a cache that cannot be written
                self._prepare()
                write_whole(self.path(digest), data, mode=0o444, synced=False)
        return data

    def local(
        self,
        digest: str,
        size_bytes: int,
        chunks: Callable[[int], Iterator[bytes]],
        origin: str,
    ) -> Path:
        """A verified copy of a blob. Of several processes that ask for it one downloads it; a
        download that was cut off goes on where it ended.

        Args:
            chunks: reads the blob from an offset on.
            origin: where it comes from, for messages.

        Raises:
            FileNotFoundError: there is no such blob.
            IntegrityError: the downloaded bytes have another digest or size.
            StoreUnreachableError: the cache cannot be written.
        """
        for _ in range(_NUM_TRIES):
            copy = self.find(digest, size_bytes)
            if copy is not None:
                return copy
            try:
                self._download(digest, size_bytes, chunks, origin)
            except RemoteError:
                raise
            except FileNotFoundError:  # the cache, which was deleted meanwhile, or the blob
                if self._partial(digest).exists():
                    raise
            except OSError as error:
                raise StoreUnreachableError(
                    f"the cache {self._root} cannot be written: {error}; set XDG_CACHE_HOME to a"
                    " writable folder of yours"
                ) from error
        raise StoreUnreachableError(
            f"the cache {self._root} is deleted all the time; keep it while a model is loaded"
        )

    def _download(
        self,
        digest: str,
        size_bytes: int,
        chunks: Callable[[int], Iterator[bytes]],
        origin: str,
    ) -> None:
        self._prepare()
        partial = self._partial(digest)
        with _locked(partial) as file:
            if self.find(digest, size_bytes) is not None:  # by another process
                partial.unlink(missing_ok=True)
                return
            file.seek(0)
            found = hashlib.file_digest(file, "sha256")
            start = size = file.tell()
            if size < size_bytes:
                for chunk in chunks(start):
                    found.update(chunk)
                    file.write(chunk)
                    transferred(len(chunk))
                    size += len(chunk)
            if size != size_bytes or f"sha256:{found.hexdigest()}" != digest:
                file.truncate(0)
                if start:  # what an earlier process left is damaged
                    return
                raise IntegrityError(
                    f"{origin} is sha256:{found.hexdigest()} with {size} bytes, expected {digest}"
                    f" with {size_bytes}; {CHANGED}"
                )
            file.flush()
            os.fchmod(file.fileno(), 0o444)
            move(partial, self.path(digest))
            self._verified[digest] = _identity(os.fstat(file.fileno()))
        self._evict()

    def _partial(self, digest: str) -> Path:
        return self._root / "partial" / digest.removeprefix("sha256:")

    def _prepare(self) -> None:
        """Make the folders, which only this user can read."""
        make_folder(self._root, mode=0o700)
        if self._root.stat().st_mode & 0o077:
            self._root.chmod(0o700)
        for folder in (self.path(""), self._partial("")):
            make_folder(folder, mode=0o700)

    def _evict(self) -> None:
        """Delete what was used the longest ago, but nothing that this process uses."""
        known = []
        for folder in (self.path(""), self._partial("")):
            for path in folder.iterdir():
                with suppress(FileNotFoundError):
                    status = path.stat()
                    known.append((status.st_mtime, status.st_size, path))
        excess = sum(size for _, size, _ in known) - self._limit_bytes
        for _, size, path in sorted(known):
            if excess > 0 and f"sha256:{path.name}" not in self._verified:
                path.unlink(missing_ok=True)
                excess -= size


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    """What changes when a file does."""
    return status.st_ino, status.st_size, status.st_ctime_ns


@contextmanager
def _locked(path: Path) -> Iterator[BufferedRandom]:
    """Open the file at a path, alone; waits for other processes."""
    while True:
        with path.open("ab+") as file:
            with suppress(OSError):  # some network file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            opened = os.fstat(file.fileno())
            now = path.stat() if path.exists() else None
            if now is not None and os.path.samestat(now, opened):
                yield file
                return
