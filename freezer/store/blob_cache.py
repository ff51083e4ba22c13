"""Cache of remote blobs by digest, since payloads are mapped into memory from local files. Imports no torch.

    $XDG_CACHE_HOME/coldpress/blobs/sha256/<digest>       ~/.cache if XDG_CACHE_HOME is not set

Digests are verified before each use; damaged copies are fetched again. Users may delete the cache at any time; nothing else does.
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
"""Age after which a partial copy belongs to a dead process."""

_PARTIAL = ".partial-"


def cache_folder() -> Path:
    """The cache folder of this user."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "coldpress"


def cached(digest: str, size_bytes: int, fetch: Callable[[Path], None], *, origin: str) -> Path:
    """A verified, read-only local copy. Several processes may ask for it at once.

    Args:
        digest: `sha256:` and hex.
        size_bytes: expected size.
        fetch: writes a copy to a path; may raise OSError.
        origin: where the blob comes from, for messages.

    Raises:
        IntegrityError: the fetched bytes have another digest.
        StoreUnreachableError: the cache cannot be written.
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
            f"the cache {folder} cannot be written: {error}; set XDG_CACHE_HOME to a writable folder", code="CP-CACHE"
        ) from error
    partial = Path(name)
    try:
        fetch(partial)
        try:
            verify_file(partial, digest=digest, size_bytes=size_bytes)
        except IntegrityError:
            size = partial.stat().st_size
            raise IntegrityError(
                f"{origin} is not what was published: got {size} bytes, expected {size_bytes} of {digest}; "
                "it was changed or damaged"
            ) from None
        partial.chmod(0o444)
        sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _remove_abandoned(folder: Path) -> None:
    for path in folder.glob(f"{_PARTIAL}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                path.unlink()
