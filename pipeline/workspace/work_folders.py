"""Where the work of a store is, and how it travels between machines that share no folder.

The work of a store in a folder is in the store itself. For a store in a bucket, each machine works
in its own folder, and the bucket carries what others need:

    STORE/.coldpress/<kind>/<key>/...   files of a folder of candidates (build -> judge), judged
                                        (judge -> driver), sources or weights
    STORE/.coldpress/<kind>/<key>.json  marker, written last: digest and size of all files; a folder
                                        without one does not exist
    STORE/.coldpress/logs/<key>.log     the whole log of a build or judge

Files that are fetched are compared with the digests of the marker before the folder gets its name.
A candidate in a folder has its own digests, written by its build and checked by its judge: a bit
that flips in between would become a final rejection of the model.
"""

from __future__ import annotations

import functools
import hashlib
import json
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from freezer.artifact import check_inside
from freezer.codec import Json
from freezer.errors import IntegrityError, StoreUnreachableError
from freezer.files import (
    digest_file,
    make_folder,
    move,
    read_document,
    remove,
    verify_file,
    write_whole,
)
from freezer.store import WORK, RemoteFiles, Store
from pipeline.workspace.machine_time import move_whole, own_path, remove_tree, staging_folder

_Kind = Literal["candidates", "judged", "sources", "weights"]


DIGESTS = "digests.json"
"""File in a candidate's folder that contains the digest of every other file, by path."""


class Workplace:
    """The work of one store on this machine. Open one with `workplace`.

    Args:
        root: the store's folder, or this machine's folder for a store in a bucket.
        remote: the bucket; None for a folder.
    """

    def __init__(self, root: Path, remote: RemoteFiles | None) -> None:
        self.root = root
        self.remote = remote
        self._listed: dict[_Kind, set[str]] = {}

    def folder(self, kind: _Kind, key: str) -> Path:
        """Return the path of a folder of work on this machine."""
        return self.root / WORK / kind / key

    @property
    def objects(self) -> Path:
        """The folder of compiled objects that builds share; of a bucket's store, those of this
        machine.
        """
        return self.root / WORK / "objects"

    def has(self, kind: _Kind, key: str) -> bool:
        """Whether a folder of work exists, for all machines.

        Raises:
            StoreUnreachableError: the bucket cannot be read.
        """
        if self.remote is None:
            return self.folder(kind, key).is_dir()
        return self._marker(kind, key) is not None

    def is_listed(self, kind: _Kind, key: str) -> bool:
        """As `has`, but a bucket is listed once, at the first call: for thousands of keys.

        Raises:
            StoreUnreachableError: the bucket cannot be read.
        """
        if self.remote is None:
            return self.has(kind, key)
        if kind not in self._listed:
            with self._reaching():
                names = self.remote.names(f"{WORK}/{kind}")
            self._listed[kind] = {
                name.removesuffix(".json") for name in names if name.endswith(".json")
            }
        return key in self._listed[kind]

    def read(
        self,
        kind: _Kind,
        key: str,
        name: str,
    ) -> bytes | None:
        """Return the content of a file in a folder of work; None if there is no such folder.

        Raises:
            StoreUnreachableError: the bucket cannot be read.
            OSError: the local folder cannot be read.
        """
        if self.remote is None:
            try:
                return read_document(self.folder(kind, key) / name)
            except FileNotFoundError:
                return None
        if self._marker(kind, key) is None:
            return None
        with self._reaching():
            return self.remote.read(f"{WORK}/{kind}/{key}/{name}")

    def keep(
        self,
        made: Path,
        kind: _Kind,
        key: str,
    ) -> None:
        """Store a folder for all machines, atomically. One that is stored already stays.

        Args:
            made: the folder on this machine. A local store moves it; a bucket copies it.
            kind, key: name to store it under.

        Raises:
            StoreUnreachableError: the bucket cannot be written.
        """
        if self.remote is None:
            move_whole(made, self.folder(kind, key))
            return
        if self.has(kind, key):
            return
        record = {}
        with self._reaching():
            for name, path in _files_in(made).items():
                record[name] = {"digest": digest_file(path), "size_bytes": path.stat().st_size}
                self.remote.put(f"{WORK}/{kind}/{key}/{name}", path)
            marker = json.dumps({"files": record}, indent=1).encode()
            self.remote.write(f"{WORK}/{kind}/{key}.json", marker)

    def bring(
        self,
        kind: _Kind,
        key: str,
        dest: Path,
    ) -> bool:
        """Fetch a folder of work to `dest`, unless it is there. Return False if there is no such
        folder.

        Raises:
            IntegrityError: a file differs from its marker.
            StoreUnreachableError: the bucket cannot be read.
        """
        if self.remote is None or dest.is_dir():
            return dest.is_dir()
        record = self._marker(kind, key)
        if record is None:
            return False
        with staging_folder(self.root) as partial:
            for name, marked in record.items():
                check_inside(name, origin=self.remote.where(f"{WORK}/{kind}/{key}.json"))
                make_folder((partial / name).parent)
                path, size_bytes = f"{WORK}/{kind}/{key}/{name}", marked["size_bytes"]
                try:
                    with self._reaching():
                        self.remote.fetch(path, partial / name, size_bytes)
                except FileNotFoundError:
                    raise IntegrityError(
                        f"{self.remote.where(path)} is missing, but its marker names it"
                    ) from None
                verify_file(partial / name, digest=marked["digest"], size_bytes=size_bytes)
            partial.chmod(0o755)
            move_whole(partial, dest)
        return True

    def drop(self, kind: _Kind, key: str) -> None:
        """Remove a folder of work for all machines, the marker first."""
        here = self.folder(kind, key)
        if here.is_dir():  # atomically, even if this process is killed
            aside = own_path(self.root / WORK, f"drop-{uuid.uuid4().hex}")
            with suppress(OSError):
                make_folder(aside.parent)
                move(here, aside)
            for folder in (aside, here):
                remove_tree(folder)
        if self.remote is None:
            return
        with suppress(OSError, StoreUnreachableError, IntegrityError):
            record = self._marker(kind, key)
            if record is not None:
                self.remote.remove(f"{WORK}/{kind}/{key}.json")
                for name in record:
                    self.remote.remove(f"{WORK}/{kind}/{key}/{name}")

    def keep_log(self, log: Path, key: str) -> None:
        """Move the finished log of a build or judge to where all machines see it. A log that cannot
        be stored is lost.
        """
        with suppress(OSError):
            if self.remote is None:
                dest = Path(log_place(str(self.root), key))
                make_folder(dest.parent)
                move(log, dest)
            else:
                self.remote.put(f"{WORK}/logs/{key}.log", log)
        with suppress(OSError):  # it is among the staging folders
            remove(log)

    def _marker(self, kind: _Kind, key: str) -> dict[str, Json] | None:
        """Return the digest and size of each file of a folder; None if there is none."""
        assert self.remote is not None
        path = f"{WORK}/{kind}/{key}.json"
        try:
            with self._reaching():
                files: dict[str, Json] = json.loads(self.remote.read(path))["files"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(
                f"{self.remote.where(path)} is damaged ({error}); delete it"
            ) from None
        return files

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Raise StoreUnreachableError for an error of the bucket, except FileNotFoundError."""
        assert self.remote is not None
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreUnreachableError(
                f"store {self.remote.where()} cannot be reached: {error}"
            ) from error


@functools.cache
def workplace(store: str) -> Workplace:
    """Return the workplace of a store on this machine.

    Args:
        store: its path, or the URI of a bucket.

    Raises:
        StoreUnreachableError: the bucket cannot be reached.
        MissingDependencyError: the bucket needs pyarrow, which is not installed.
    """
    opened = Store.open(store, create=True)
    return Workplace(opened.root, opened.remote)


# Names


def judged_name(key: str, model: str, missing: Collection[str] = ()) -> str:
    """Return the name of the folder of a judge's result and artifact until they are published.

    Args:
        key: of the judge.
        model: models that differ only in name share a key, but each has an artifact.
        missing: recipes that were not built. A judge that has them is another result.
    """
    without = hashlib.sha256(" ".join(sorted(missing)).encode()).hexdigest()[:16]
    return f"{key}-{model}~{without}" if missing else f"{key}-{model}"


def log_place(uri: str, key: str) -> str:
    """Return where the whole log of a build or judge is: a path, or a URI in a bucket."""
    return f"{uri.partition('?')[0].rstrip('/')}/{WORK}/logs/{key}.log"


# Digests and architectures of candidates


ARCHITECTURE = "architecture"
"""File of a candidate, and of a build's staging, with the digest of the model's architecture."""


def architecture_of(place: Workplace, key: str) -> str:
    """Return the architecture of a stored candidate; empty if an earlier release built it."""
    with suppress(FileNotFoundError):
        return (place.read("candidates", key, ARCHITECTURE) or b"").decode()
    return ""


def _files_in(folder: Path) -> dict[str, Path]:
    """Return all files below a folder by their relative paths, sorted."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path for path in paths}


def note_digests(folder: Path) -> None:
    """Write the digests of a candidate's files, before the folder is moved to its name."""
    digests = {name: digest_file(path) for name, path in _files_in(folder).items()}
    write_whole(folder / DIGESTS, json.dumps(digests, indent=1).encode())


def damage_of(folder: Path) -> str | None:
    """Return how a candidate differs from what was built; None if it does not, or if an earlier
    release wrote no digests.
    """
    if not folder.is_dir():
        return f"{folder} is missing"
    try:
        digests = json.loads(read_document(folder / DIGESTS))
        damaged = [name for name, digest in digests.items() if digest_file(folder / name) != digest]
    except FileNotFoundError as error:
        return None if error.filename == str(folder / DIGESTS) else f"{error.filename} is missing"
    except (OSError, ValueError, AttributeError, IntegrityError) as error:
        return f"{folder} cannot be read: {error}"
    return f"{folder / damaged[0]} differs from what was built" if damaged else None
