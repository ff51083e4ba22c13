"""The cache of blobs: local copies of what a remote store holds, by digest. Imports no torch.

    $XDG_CACHE_HOME/coldpress/blobs/sha256/<digest>       ~/.cache where XDG_CACHE_HOME is not set

Payloads are mapped into memory from files, so they have to be local. What lies here is compared with its digest before each use; a
copy that is damaged is fetched again. It may be removed at any time, and nothing else removes it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from freezer.errors import IntegrityError, StoreUnreachableError
from freezer.files.atomic import sync
from freezer.files.digest import verify_file

ABANDONED_S = 86_400.0
"""After which a copy that was begun is taken for one whose process died."""

_PARTIAL = ".partial-"


def cache_folder() -> Path:
    """Where this user's copies lie."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "coldpress"


def cached(digest: str, size_bytes: int, fetch: Callable[[Path], None], *, origin: str) -> Path:
    """A local copy with a digest; read it, never write it. Several processes may ask for it at once.

    Args:
        digest: `sha256:` and hex.
        size_bytes: of it.
        fetch: writes a copy to a path; called where there is none that is whole.
        origin: for messages.

    Raises:
        IntegrityError: what was fetched is not what the digest says.
        StoreUnreachableError: the cache cannot be written.
        OSError: of `fetch`.
    """
    folder = cache_folder() / "blobs" / "sha256"
    path = folder / digest.removeprefix("sha256:")
    with contextlib.suppress(IntegrityError):  # missing or damaged
        verify_file(path, digest=digest, size_bytes=size_bytes)
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        handle, name = tempfile.mkstemp(prefix=_PARTIAL, dir=folder)
        os.close(handle)
    except OSError as error:
        raise StoreUnreachableError(
            f"the cache {folder} cannot be written: {error}; set XDG_CACHE_HOME to a folder that can", code="CP-CACHE"
        ) from error
    partial = Path(name)
    try:
        fetch(partial)
        _check(partial, digest, size_bytes, origin)
        partial.chmod(0o444)
        sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _check(path: Path, digest: str, size_bytes: int, origin: str) -> None:
    try:
        verify_file(path, digest=digest, size_bytes=size_bytes)
    except IntegrityError:
        found = path.stat().st_size
        raise IntegrityError(
            f"{origin} is not what was published: {found} bytes came, expected {size_bytes} of {digest}; it was changed or damaged"
        ) from None


def _remove_abandoned(folder: Path) -> None:
    for path in folder.glob(f"{_PARTIAL}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                path.unlink()
