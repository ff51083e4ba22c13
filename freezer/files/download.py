"""Fetch files that a source or samples name by URL: https://, s3:// and gs://, whole or not at all, held against a digest.

A fetched file lies at `FOLDER/<sha256>/<name>`. A file whose digest is known beforehand is fetched once and never asked for again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from freezer.errors import IntegrityError, MissingDependencyError, SourceError, first_line

HTTP = ("https", "http")
OBJECTS = ("s3", "gs")
CHUNK_BYTES = 1 << 20
CONNECT_S, READ_S = 10, 60
RETRIES = 3
PIN = "`sha256:` (with `coldpress freeze`, `--sha256`)"
"""How a remedy names the digest, to readers of a catalog and to users of the command."""
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def is_url(location: str) -> bool:
    """Whether a location names a file that must be fetched."""
    return urlsplit(location).scheme in (*HTTP, *OBJECTS)


def fetch(url: str, folder: Path, *, sha256: str | None = None) -> Path:
    """The local copy of a file.

    Args:
        url: https://, s3:// or gs://; http:// only with a digest, since nothing else tells its bytes from a stranger's.
        folder: where fetched files lie; made if it does not exist.
        sha256: the digest that the file must have, in hexadecimal.

    Raises:
        SourceError: it is not there, cannot be reached, or came in part.
        IntegrityError: its digest is another.
        MissingDependencyError: the kind of URL needs a package that is not installed.
    """
    name = file_name(url)
    if sha256 is not None and (folder / sha256 / name).is_file():
        return folder / sha256 / name
    if urlsplit(url).scheme == "http" and sha256 is None:
        raise SourceError(f"{url}: http:// is taken only with a digest; use https://, or add {PIN}", code="CP-FETCH")
    folder.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(prefix=".fetch-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as out, _opened(url, pinned=sha256 is not None) as source:
            digest = _copy(source, out)
            out.flush()
            os.fsync(out.fileno())
        if sha256 is not None and digest != sha256:
            raise IntegrityError(
                f"{url}: got sha256 {digest}, expected {sha256}; the file was changed, or the pinned digest, {PIN}, is an old one",
                code="CP-FETCH-DIGEST",
            )
        done = folder / digest / name
        done.parent.mkdir(exist_ok=True)
        os.replace(unfinished, done)
        return done
    finally:
        Path(unfinished).unlink(missing_ok=True)


def identity(url: str) -> str | None:
    """What the server says of a file without sending it (ETag, size, time); None when it says nothing that tells versions apart.

    Raises:
        SourceError: it is not there, or cannot be reached.
    """
    if urlsplit(url).scheme in OBJECTS:
        with _fetching(url):
            filesystem, path = _filesystem(url)
            info = filesystem.get_file_info(path)
            return f"{info.size}|{info.mtime_ns}" if info.is_file else None
    with _fetching(url), _session() as session:
        response = session.head(url, timeout=(CONNECT_S, READ_S), allow_redirects=True)
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
        return f"{tag}|{response.headers.get('Content-Length')}" if response.ok and tag else None


def file_name(url: str) -> str:
    """The last part of a URL's path: its suffix tells the kind of samples."""
    return PurePosixPath(unquote(urlsplit(url).path)).name or "file"


def _copy(source: Any, out: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK_BYTES):
        digest.update(chunk)
        out.write(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def _opened(url: str, *, pinned: bool) -> Iterator[Any]:
    if urlsplit(url).scheme in OBJECTS:
        with _fetching(url):
            filesystem, path = _filesystem(url)
            with filesystem.open_input_stream(path) as stream:
                yield stream
        return
    with _fetching(url), _session() as session, session.get(url, stream=True, timeout=(CONNECT_S, READ_S)) as response:
        response.raise_for_status()
        if urlsplit(response.url).scheme != "https" and not pinned:
            raise SourceError(f"{url} leads to {response.url}, which is not https; add {PIN}", code="CP-FETCH")
        response.raw.decode_content = True
        yield response.raw


def _session() -> Any:
    try:
        import requests
        from requests.adapters import HTTPAdapter
        from urllib3.util import Retry
    except ImportError:
        raise MissingDependencyError("fetching https:// needs requests; pip install 'coldpress[pipeline]'") from None
    session = requests.Session()
    retry = Retry(total=RETRIES, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504), raise_on_status=False)
    for scheme in HTTP:
        session.mount(f"{scheme}://", HTTPAdapter(max_retries=retry))
    return session


def _filesystem(url: str) -> tuple[Any, str]:
    try:
        from pyarrow.fs import FileSystem
    except ImportError:
        raise MissingDependencyError("fetching s3:// and gs:// needs pyarrow; pip install 'coldpress[stores]'") from None
    return FileSystem.from_uri(url)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _fetching(url: str) -> Iterator[None]:
    """Turn whatever requests, urllib3 and pyarrow raise into SourceError; a full disk stays what it is."""
    try:
        yield
    except (SourceError, MissingDependencyError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK:
            raise
        raise SourceError(
            f"{url} cannot be fetched: {first_line(error)}; is it there, and may it be read?", code="CP-FETCH"
        ) from error
