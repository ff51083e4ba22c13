"""The files of a store in a bucket (s3://, gs://). Imports pyarrow when one is opened, and no torch.

An object appears whole: what is small is one request, what is large is put together by its last one. A writer that is killed leaves
nothing; one that an exception stopped may leave a truncated object under a digest, which has another size, and is written again.

S3 has no lock, and pyarrow no conditional write. So locks are advisory: whoever wants one writes an object, waits until any other
that saw none would have written too, and has it if the object is still its own. Whoever relies on one reads back what it wrote.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from freezer.errors import StoreUnreachableError, first_line
from freezer.files.atomic import sync
from freezer.files.buckets import Bucket, remedy
from freezer.store.backend import RemoteError
from freezer.store.blob_cache import cached

CHUNK_BYTES = 8 << 20
NUM_READS = 50
"""Of an object that others write meanwhile, until one is whole."""

NUM_AT_ONCE = 16
"""Requests that only ask whether something is there."""

WRITTEN_ONCE = ("/blobs/", ".arrow")
"""In paths of objects whose content never changes."""

GONE = ("NO_SUCH_KEY", "RESOURCE_NOT_FOUND")
"""What S3's servers say of an object that is not there."""

SETTLE_S = 0.5
"""Between the write of a lock and the look whether it stayed: longer than another's look and write take."""

POLL_S = 0.5
EXPIRY_S = 30.0
"""After which a lock that stayed the same is taken for one whose holder died; holders have it for some requests' time only."""

PATIENCE_S = 180.0
"""How long to wait for others that have a lock one after the other."""


class RemoteFiles:
    """A store in a bucket.

    Args:
        bucket: the place.
        work: the folder in it that is no model; locks are objects there.

    Raises:
        StoreUnreachableError: the bucket cannot be reached, or is not there.
    """

    exact = False

    def __init__(self, bucket: Bucket, *, work: str) -> None:
        self._bucket, self._fs, self._work = bucket, bucket.filesystem, work
        self._is_s3 = bucket.where.startswith("s3:")
        name = bucket.base.partition("/")[0]
        try:
            with self._told():
                found = self._fs.get_file_info(name)
        except OSError as error:
            raise StoreUnreachableError(f"store {bucket.uri!r} cannot be reached: {error}") from error
        if found.type.name == "NotFound":
            raise StoreUnreachableError(f"store {bucket.uri!r}: there is no bucket {name!r}; make it, or mend --store")

    def where(self, path: str = "") -> str:
        """A path as people are told it; the store itself by the URI that it was opened by."""
        return f"{self._bucket.where}/{path}" if path else self._bucket.uri

    def read(self, path: str) -> bytes:
        """The content of an object, as one writer left it.

        pyarrow asks for the size and then for as many bytes: of an object that was written anew in between, for a part of it.

        Raises:
            FileNotFoundError: there is none.
            RemoteError: it cannot be read, or never had the size that its server says.
        """
        for _ in range(NUM_READS):
            with self._told(), self._fs.open_input_stream(self._at(path)) as stream:
                content: bytes = stream.read()
            if any(name in path for name in WRITTEN_ONCE) or (size := self._size(path)) == len(content):
                return content
            if size is None:
                raise FileNotFoundError(self.where(path))
        raise RemoteError(
            f"{self.where(path)}: {NUM_READS} reads gave other numbers of bytes than the object is said to have; others write "
            "it all the time, or the server unpacks it on the way: upload it without Content-Encoding"
        )

    def write(self, path: str, data: bytes) -> None:
        """Write an object, in the place of one that is there."""
        with self._told(), self._fs.open_output_stream(self._at(path)) as stream:
            stream.write(data)

    def put(self, path: str, source: Path) -> None:
        """Upload a local file."""
        with self._told(), source.open("rb") as file, self._fs.open_output_stream(self._at(path)) as stream:
            while chunk := file.read(CHUNK_BYTES):
                stream.write(chunk)
        if self._size(path) != source.stat().st_size:
            raise RemoteError(f"{self.where(path)} has not the size of what was written to it; another writes it, too: try again")

    def holds(self, path: str, *, digest: str, size_bytes: int) -> bool:
        """Whether an object is there and has that size; its digest is compared by whoever reads it."""
        return self._size(path) == size_bytes

    def local(self, path: str, *, digest: str, size_bytes: int) -> Path:
        """A copy in this user's cache, which is fetched unless it is there and whole."""
        return cached(digest, size_bytes, lambda dest: self._download(path, dest), origin=self.where(path))

    def fetch(self, path: str, dest: Path) -> None:
        """Download an object."""
        self._download(path, dest)
        sync(dest)

    def folders_with(self, name: str) -> list[str]:
        """The folders directly in the store that hold an object of that name, sorted."""
        from pyarrow.fs import FileSelector

        with self._told():
            if self._is_s3:
                listed = self._fs.get_file_info(FileSelector(self._bucket.base, allow_not_found=True))
                folders = [info.base_name for info in listed if info.type.name == "Directory"]
                with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
                    sizes = list(pool.map(lambda folder: self._size(f"{folder}/{name}"), folders))
                return sorted(folder for folder, size in zip(folders, sizes, strict=True) if size is not None)
            # Google's servers list objects alone, and no folder that was never made as one.
            listed = self._fs.get_file_info(FileSelector(self._bucket.base, allow_not_found=True, recursive=True))
        parts = [info.path.removeprefix(f"{self._bucket.base}/").split("/") for info in listed]
        return sorted(part[0] for part in parts if len(part) == 2 and part[1] == name)

    def names(self, folder: str) -> list[str]:
        """The names of the objects directly in a folder."""
        from pyarrow.fs import FileSelector

        with self._told():
            listed = self._fs.get_file_info(FileSelector(self._at(folder), allow_not_found=True))
        return [info.base_name for info in listed if info.type.name == "File"]

    def remove(self, path: str) -> None:
        """Delete an object, if it is there."""
        with contextlib.suppress(FileNotFoundError), self._told():
            self._fs.delete_file(self._at(path))

    def prepare(self, folder: str) -> None:
        """Do nothing: a bucket has no folders, and no object that was only begun."""

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Keep others that lock the same name out, as far as their clocks and this one's run alike.

        Raises:
            RemoteError: others have it for longer than PATIENCE_S.
        """
        path = f"{self._work}/locks/{name}"
        token = self._lock(path, name)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if self._peek(path) == token:
                    self.remove(path)

    def _lock(self, path: str, name: str) -> bytes:
        own = json.dumps({"token": uuid.uuid4().hex, "host": platform.node(), "pid": os.getpid(), "time": time.time()}).encode()
        until = time.monotonic() + PATIENCE_S
        seen, since = self._peek(path), time.monotonic()
        while True:
            if seen is None or time.monotonic() - since > EXPIRY_S:
                self.write(path, own)
                time.sleep(SETTLE_S)
                if self._peek(path) == own:
                    return own
            if time.monotonic() > until:
                raise RemoteError(
                    f"{name!r} is locked by others for more than {PATIENCE_S:.0f} s: {seen!r} is in {self.where(path)}"
                )
            time.sleep(POLL_S)
            found = self._peek(path)
            if found != seen:
                seen, since = found, time.monotonic()

    def _peek(self, path: str) -> bytes | None:
        try:
            return self.read(path)
        except FileNotFoundError:
            return None

    def _download(self, path: str, dest: Path) -> None:
        with self._told(), self._fs.open_input_stream(self._at(path)) as stream, dest.open("wb") as file:
            while chunk := stream.read(CHUNK_BYTES):
                file.write(chunk)

    def _size(self, path: str) -> int | None:
        """The size of an object, in bytes; None where there is none."""
        with self._told():
            if not self._is_s3:
                info = self._fs.get_file_info(self._at(path))
                return int(info.size) if info.type.name == "File" else None
            try:  # one request; get_file_info would ask for a folder of that name too
                with self._fs.open_input_file(self._at(path)) as file:
                    return int(file.size())
            except FileNotFoundError:
                return None

    def _at(self, path: str) -> str:
        return f"{self._bucket.base}/{path}"

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Make one sentence, with a remedy, of what the servers say; what concerns a local file stays as it is."""
        from pyarrow import ArrowException

        try:
            yield
        except FileNotFoundError:
            raise
        except (OSError, ArrowException) as error:
            if any(word in str(error) for word in GONE):  # between two requests that pyarrow makes
                raise FileNotFoundError(str(error)) from error
            if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
                raise
            raise RemoteError(f"{first_line(error)}; {remedy(self._bucket.where.partition(':')[0])}") from error
