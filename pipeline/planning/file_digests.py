"""Digests of source files, cached by path, size and modification time."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from freezer.files.atomic import make_folder, move, write_whole
from freezer.files.digest import digest_file
from pipeline.workspace.staging import own_path


class FileDigests:
    """Digests of files, cached by path, size and modification time in a JSON file beside the staging folders."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        try:
            self._known: dict[str, str] = json.loads(cache.read_text())
        except (OSError, ValueError):
            self._known = {}
        self._changed = False

    def of(self, path: Path) -> str:
        """Return `sha256:` and the digest of a file."""
        stat = path.stat()
        key = f"{path}|{stat.st_size}|{stat.st_mtime_ns}"
        if key not in self._known:
            self._known[key] = digest_file(path)
            self._changed = True
        return self._known[key]

    def recall(self, what: str) -> str | None:
        """Return the digest that was remembered under a name."""
        return self._known.get(what)

    def remember(self, what: str, digest: str) -> None:
        """Remember a digest under a name."""
        self._changed = self._changed or self._known.get(what) != digest
        self._known[what] = digest

    def save(self) -> None:
        """Write the cache atomically. Failure is ignored: the digests are then computed again."""
        if not self._changed:
            return
        with contextlib.suppress(OSError):
            partial = own_path(self._cache.parent, self._cache.name)  # cleaned up if the driver is killed
            make_folder(partial.parent)
            write_whole(partial, json.dumps(self._known).encode(), synced=False)
            move(partial, self._cache)
