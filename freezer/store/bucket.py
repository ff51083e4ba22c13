"""The files of a store in a bucket (s3://, gs://). Imports pyarrow when a bucket is opened, and no
torch.

Objects appear whole: small ones in one request, large ones with their last part. A killed writer
leaves nothing. An exception may leave a truncated object under a digest; its size is wrong, so it
is written again.

S3 has no locks and pyarrow no conditional write, so locks are advisory: write a lock object, wait
until any other process that saw none would have written too, and own the lock if the object is
unchanged. Callers read back what they wrote under a lock.
"""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from freezer.errors import StoreUnreachableError, first_line
from freezer.files import (
    CHUNK_BYTES,
    DOCUMENT_BYTES,
    Bucket,
    RemoteError,
    chunks_of,
    remedy,
)
from freezer.store.cache import BlobCache
from freezer.store.local_files import WORK

_NUM_READS = 50
"""Attempts at reading an object while others replace it."""

WRITTEN_ONCE = ("/blobs/", ".arrow")
"""Parts of the paths of objects that never change."""

GONE = ("NO_SUCH_KEY", "RESOURCE_NOT_FOUND")
"""Error texts of S3 servers for a missing object."""

OVERFLOW = "Failed to flush response stream"
"""Error text of the AWS SDK for an answer longer than the object was: the object is missing now, or
has another size.
"""

SETTLE_S = 0.5
"""Time between writing a lock and reading it back; longer than another process needs to read and
write it.
"""

POLL_S = 0.5
EXPIRY_S = 30.0
"""Age of a lock whose holder must be dead; locks are held for a few requests only."""

PATIENCE_S = 180.0
"""Longest wait for a lock."""


class RemoteFiles:
    """A store in a bucket.

    Args:
        bucket: the place.

    Attributes:
        cache: copies of blobs.

    Raises:
        StoreUnreachableError: the bucket does not exist or cannot be reached.
    """

    exact = False

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._fs = bucket.filesystem
        self.cache = BlobCache()
        name = bucket.base.partition("/")[0]
        try:
            with self._reaching():
                found = self._fs.get_file_info(name)
        except OSError as error:
            raise StoreUnreachableError(
                f"store {bucket.uri!r} cannot be reached: {error}"
            ) from error
        if found.type.name == "NotFound":
            raise StoreUnreachableError(
                f"store {bucket.uri!r}: bucket {name!r} does not exist; make it, or fix --store"
            )

    def where(self, path: str = "") -> str:
        """A URI for messages; of the store itself the one that opened it."""
        return f"{self._bucket.where}/{path}" if path else self._bucket.uri

    def read(self, path: str, limit_bytes: int = DOCUMENT_BYTES) -> bytes:
        """Read an object of limited size as one writer left it.

        pyarrow asks for the size and then for that many bytes, which truncates an object that is
        replaced in between.

        Raises:
            FileNotFoundError: the object does not exist.
            IntegrityError: it is larger.
            RemoteError: it cannot be read, or its size never matches the one that the server
                reports.
        """
        immutable = any(name in path for name in WRITTEN_ONCE)
        for _ in range(_NUM_READS):
            try:
                content = b"".join(self.chunks(path, limit_bytes))
            except RemoteError as error:
                if OVERFLOW not in str(error):
                    raise
            else:
                if immutable or self._size(path) == len(content):
                    return content
        raise RemoteError(
            f"{self.where(path)}: {_NUM_READS} reads differ from the size that the server reports;"
            " other processes replace the object all the time, or the server decompresses it:"
            " upload it without Content-Encoding"
        )

    def write(self, path: str, data: bytes) -> None:
        """Write or replace an object."""
        with self._reaching(), self._fs.open_output_stream(self._at(path)) as stream:
            stream.write(data)

    def put(self, path: str, source: Path) -> None:
        """Upload a local file."""
        with (
            self._reaching(),
            source.open("rb") as file,
            self._fs.open_output_stream(self._at(path)) as stream,
        ):
            shutil.copyfileobj(file, stream, CHUNK_BYTES)

    def holds(
        self,
        path: str,
        *,
        digest: str,
        size_bytes: int,
    ) -> bool:
        """Whether an object of this size exists; readers verify its digest."""
        return self._size(path) == size_bytes

    def local(
        self,
        path: str,
        *,
        digest: str,
        size_bytes: int,
    ) -> Path:
        """A verified, read-only copy in this user's cache. Several processes may ask for it at
        once.

        Raises:
            IntegrityError: the fetched bytes have another digest.
            StoreUnreachableError: the cache cannot be written.
        """
        return self.cache.local(
            digest,
            size_bytes,
            lambda start: self.chunks(path, size_bytes, start),
            self.where(path),
        )

    def fetch(
        self,
        path: str,
        dest: Path,
        limit_bytes: int,
    ) -> None:
        """Download an object of limited size."""
        with dest.open("wb") as file:
            file.writelines(self.chunks(path, limit_bytes))

    def chunks(self, path: str, limit_bytes: int, start: int = 0) -> Iterator[bytes]:
        """Read an object of limited size in parts, from an offset on."""
        opened = self._fs.open_input_file if start else self._fs.open_input_stream
        with self._reaching(), opened(self._at(path)) as stream:
            if start:
                stream.seek(start)
            yield from chunks_of(stream, limit_bytes - start, self.where(path))

    def modified(self, path: str) -> float:
        """When an object was written, in seconds since the epoch by the server's clock."""
        info = self._info(path)
        if not info.is_file:
            raise FileNotFoundError(self.where(path))
        return float(info.mtime_ns) / 1e9

    def folders_with(self, name: str) -> list[str]:
        """Top-level folders that contain an object of this name, sorted.

        Lists all objects: Google lists no folders.
        """
        folders = []
        for path in self.sizes(""):
            folder, _, rest = path.partition("/")
            if rest == name:
                folders.append(folder)
        return sorted(folders)

    def names(self, folder: str) -> list[str]:
        """Names of the objects in a folder."""
        return list(self.sizes(folder, recursive=False))

    def sizes(self, folder: str, *, recursive: bool = True) -> dict[str, int]:
        """Bytes of all objects below a folder, by path relative to it; if not `recursive`, of those
        in it.
        """
        from pyarrow.fs import FileSelector

        base = self._at(folder).rstrip("/")
        below = FileSelector(base, allow_not_found=True, recursive=recursive)
        with self._reaching():
            infos = self._fs.get_file_info(below)
        return {
            info.path.removeprefix(f"{base}/"): int(info.size) for info in infos if info.is_file
        }

    def remove(self, path: str) -> None:
        """Delete an object, if it exists."""
        with contextlib.suppress(FileNotFoundError), self._reaching():
            self._fs.delete_file(self._at(path))

    def prepare(self, folder: str) -> None:
        """Do nothing: buckets have neither folders nor partial objects."""

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Exclude others that lock the same name, provided that their clocks run at the same rate.

        Raises:
            RemoteError: others hold the lock for longer than PATIENCE_S.
        """
        path = f"{WORK}/locks/{name}"
        token = self._lock(path, name)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if self._peek(path) == token:
                    self.remove(path)

    def _lock(self, path: str, name: str) -> bytes:
        token = json.dumps({"token": uuid.uuid4().hex, "host": platform.node()}).encode()
        until = time.monotonic() + PATIENCE_S
        seen, since = self._peek(path), time.monotonic()
        while True:
            if seen is None or time.monotonic() - since > EXPIRY_S:
                self.write(path, token)
                time.sleep(SETTLE_S)
                if self._peek(path) == token:
                    return token
            if time.monotonic() > until:
                raise RemoteError(
                    f"{name!r} is locked by others for over {PATIENCE_S:.0f} s: {self.where(path)}"
                    f" contains {seen!r}"
                )
            time.sleep(POLL_S)
            content = self._peek(path)
            if content != seen:
                seen, since = content, time.monotonic()

    def _peek(self, path: str) -> bytes | None:
        try:
            return self.read(path)
        except FileNotFoundError:
            return None

    def _size(self, path: str) -> int | None:
        """The size of an object, in bytes; None if it does not exist."""
        info = self._info(path)
        return int(info.size) if info.is_file else None

    def _info(self, path: str) -> Any:
        """Information of pyarrow on an object."""
        with self._reaching():
            return self._fs.get_file_info(self._at(path))

    def _at(self, path: str) -> str:
        return f"{self._bucket.base}/{path}"

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        """Turn errors of servers into a RemoteError with a remedy; errors of local files pass."""
        from pyarrow import ArrowException

        try:
            yield
        except FileNotFoundError:
            raise
        except (OSError, ArrowException) as error:
            if any(word in str(error) for word in GONE):  # between two requests that pyarrow makes
                raise FileNotFoundError(str(error)) from error
            of_network = isinstance(error, ConnectionError | TimeoutError | ArrowException)
            if not of_network and error.errno is not None:
                raise
            scheme = self._bucket.where.partition(":")[0]
            raise RemoteError(f"{first_line(error)}; {remedy(scheme)}") from error
