"""The files of a store in a local folder, and URIs of stores. Imports no torch."""

from __future__ import annotations

import fcntl
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlparse

from freezer.errors import IntegrityError, UsageError
from freezer.files import (
    DOCUMENT_BYTES,
    SCHEMES,
    chunks_of,
    copy_whole,
    link_whole,
    make_folder,
    open_regular,
    path_in_bucket,
    remove,
    retried,
    verify_file,
    write_whole,
)

WORK = ".coldpress"
"""The folder of a store for the ledger, candidates and locks; not a model."""


class LocalFiles:
    """A store in a local folder. Locks are exclusive wherever the file system shares them.

    Written files appear whole or not at all, and are durable when the call returns. Methods raise
    OSError: for a missing file FileNotFoundError.

    Args:
        root: of the store; files in its work folder are linked into the store instead of copied.

    Attributes:
        exact: whether locks are exclusive; otherwise they are advisory.
    """

    exact = True

    def __init__(self, root: Path) -> None:
        self._root, self._work = root, root / WORK

    def where(self, path: str = "") -> str:
        """A path for messages: absolute, or a URI."""
        return str(self._root / path)

    def read(self, path: str, limit_bytes: int = DOCUMENT_BYTES) -> bytes:
        """Read a file of limited size."""
        return b"".join(self.chunks(path, limit_bytes))

    def write(self, path: str, data: bytes) -> None:
        """Write or replace a file in a prepared folder."""
        write_whole(self._root / path, data, mode=0o644)

    def put(self, path: str, source: Path) -> None:
        """Write or replace a file: link one of the work folder, copy any other, which its owner may
        change later.
        """
        keep = link_whole if self._work in source.parents else copy_whole
        keep(source, self._root / path, mode=0o444)

    def holds(
        self,
        path: str,
        *,
        digest: str,
        size_bytes: int,
    ) -> bool:
        """Whether a file exists and, as far as can be checked without downloading it, has this
        content.
        """
        try:
            verify_file(self._root / path, digest=digest, size_bytes=size_bytes)
        except IntegrityError:
            return False
        return True

    def local(
        self,
        path: str,
        *,
        digest: str,
        size_bytes: int,
    ) -> Path:
        """A read-only local copy of a file, or the store's own; the caller verifies its digest."""
        return self._root / path

    def chunks(self, path: str, limit_bytes: int) -> Iterator[bytes]:
        """Read a file of limited size in parts; the caller verifies its digest."""
        with open_regular(self._root / path) as file:
            yield from chunks_of(file, limit_bytes, self.where(path))

    def modified(self, path: str) -> float:
        """When a file was written, in seconds since the epoch."""
        return (self._root / path).stat().st_mtime

    def folders_with(self, name: str) -> list[str]:
        """Top-level folders that contain a file of this name, sorted."""
        return sorted(path.parent.name for path in self._root.glob(f"*/{name}"))

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of all files below a folder, by path relative to it. Those of a file that has
        several names are shared by these.
        """
        top, sizes = self._root / folder, {}
        for path in top.rglob("*"):
            with suppress(FileNotFoundError):  # others may remove it
                status = path.lstat()
                if not stat.S_ISDIR(status.st_mode):
                    sizes[str(path.relative_to(top))] = status.st_size // max(status.st_nlink, 1)
        return sizes

    def remove(self, path: str) -> None:
        """Delete a file, if it exists."""
        remove(self._root / path)

    def prepare(self, folder: str) -> None:
        """Make a folder and remove partial files of killed writers, under its lock."""
        make_folder(self._root / folder)
        for path in (self._root / folder).glob(".*"):
            remove(path)

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Exclude others that lock the same name, as far as `exact` says."""
        locks = self._work / "locks"
        make_folder(locks)
        with retried(lambda: open_regular(locks / name, "ab")) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def one_spelling(uri: str) -> str:
    """Normalize a store's URI without opening it: `/s`, `/s/` and `file:///s` are one store, and so
    are `s3://b/p` and `s3://b/p/`.

    Of a bucket's options only the endpoint identifies the store.

    Raises:
        UsageError: the scheme is not supported.
    """
    parts = urlparse(uri)
    if parts.scheme not in SCHEMES:
        return str(local_folder(uri))
    endpoint = dict(parse_qsl(parts.query)).get("endpoint_override")
    return f"{parts.scheme}://{path_in_bucket(uri)}" + (
        f"?endpoint_override={endpoint}" if endpoint else ""
    )


def local_folder(uri: str) -> Path:
    """The folder of a URI outside buckets.

    Raises:
        UsageError: the scheme is not supported, or the URI names another host.
    """
    parts = urlparse(uri)
    if parts.scheme not in ("", "file"):
        raise UsageError(
            f"store {uri!r}: unknown scheme {parts.scheme!r}; name a local folder, s3://, gs:// or"
            " oci://"
        )
    if parts.scheme and parts.netloc not in ("", "localhost"):
        raise UsageError(
            f"store {uri!r} names the host {parts.netloc!r}; a local folder is file:PATH or file:///PATH"
        )
    return Path(unquote(parts.path) if parts.scheme else uri).absolute()
