"""The files of a store, wherever it is: what the OCI layout needs of a place, and a local folder as such a place. Imports no torch.

Paths are relative to the store, with `/` between their parts; `` is the store itself. What cannot be done raises OSError, and
FileNotFoundError where there is no such file.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from freezer.errors import IntegrityError
from freezer.files.atomic import copy_whole, link_whole, make_folder, remove, retried, write_whole
from freezer.files.digest import verify_file


class RemoteError(OSError):
    """The place that holds a store did not do what it was asked; never raised of a local file."""


class StoreFiles(Protocol):
    """A place that holds a store. What is written appears whole or not at all, and is durable when the call returns."""

    @property
    def exact(self) -> bool:
        """Whether a lock keeps all others out; else it only makes it unlikely that two write at once."""
        ...

    def where(self, path: str = "") -> str:
        """A path as people are told it: absolute, or a URI."""
        ...

    def read(self, path: str) -> bytes:
        """The content of a file."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Write a file into a folder that was prepared, in the place of one that is there."""
        ...

    def put(self, path: str, source: Path) -> None:
        """Write a file that has a local one's content, in the place of one that is there; the local one stays as it is."""
        ...

    def holds(self, path: str, *, digest: str, size_bytes: int) -> bool:
        """Whether a file is there and, as far as the place can tell without carrying it over a network, has that content."""
        ...

    def local(self, path: str, *, digest: str, size_bytes: int) -> Path:
        """A local file that stands for one of the store; its digest is the caller's to verify. Read it, never write it."""
        ...

    def fetch(self, path: str, dest: Path) -> None:
        """Copy a file to a local one that is not there yet; its digest is the caller's to verify."""
        ...

    def folders_with(self, name: str) -> list[str]:
        """The folders directly in the store that hold a file of that name, sorted."""
        ...

    def prepare(self, folder: str) -> None:
        """Make a folder ready to be written into: there, and without what writers that were killed had begun; under its lock."""
        ...

    def locked(self, name: str) -> AbstractContextManager[None]:
        """Keep all others that lock the same name out, as far as `exact` says."""
        ...


class LocalFiles:
    """A store in a local folder. Locks are exact wherever the file system shares them.

    Args:
        root: of the store.
        work: the folder in it that is no model: it holds the locks, and what lies in it is linked into the store, not copied.
    """

    exact = True

    def __init__(self, root: Path, *, work: str) -> None:
        self._root, self._work = root, root / work

    def where(self, path: str = "") -> str:
        """A path as people are told it."""
        return str(self._root / path)

    def read(self, path: str) -> bytes:
        """The content of a file."""
        return (self._root / path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        """Write a file, in the place of one that is there."""
        write_whole(self._root / path, data, mode=0o644)

    def put(self, path: str, source: Path) -> None:
        """Link a file that this store's own workers made; copy any other, which its owner may change later."""
        keep = link_whole if self._work in source.parents else copy_whole
        keep(source, self._root / path, mode=0o444)

    def holds(self, path: str, *, digest: str, size_bytes: int) -> bool:
        """Whether a file is there and has that content, by its digest."""
        try:
            verify_file(self._root / path, digest=digest, size_bytes=size_bytes)
        except IntegrityError:
            return False
        return True

    def local(self, path: str, *, digest: str, size_bytes: int) -> Path:
        """The store's own file."""
        return self._root / path

    def fetch(self, path: str, dest: Path) -> None:
        """Copy a file."""
        shutil.copyfile(self._root / path, dest)

    def folders_with(self, name: str) -> list[str]:
        """The folders directly in the store that hold a file of that name, sorted."""
        return sorted(path.parent.name for path in self._root.glob(f"*/{name}"))

    def prepare(self, folder: str) -> None:
        """Make a folder if it is not there, and remove its hidden files."""
        make_folder(self._root / folder)
        for path in (self._root / folder).glob(".*"):
            remove(path)

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Keep all others that lock the same name out."""
        locks = self._work / "locks"
        make_folder(locks)
        with retried(lambda: (locks / name).open("a")) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
