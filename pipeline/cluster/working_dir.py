"""What a submitted job gets: a working directory with the project's packages and the catalog's
folder, and absolute locations.

Files keep their paths relative to the current directory, so `python:examples.models:ranker` and
`samples: data/x.safetensors` mean the same on the cluster. The folder of a catalog outside of the
current directory becomes `catalog/`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

from pathspec import GitIgnoreSpec

import freezer
from freezer.artifact import MANIFEST
from freezer.errors import UsageError
from freezer.files import link_or_copy

MAX_BYTES = 500 * 1024 * 1024
"""Limit of a working directory; Ray's own limit is 512 MB including the archive."""

_NUM_NAMED = 5
PACKAGES = ("freezer", "pipeline", "jobs")

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable that Ray sets for the driver of a submitted job."""

EXCLUDED = (".*", "__pycache__", "*.pyc", "node_modules", "*.egg-info", "mlruns", "mlartifacts")
"""Names that are not uploaded unless an entry or --include names them."""

KEYS = ("*.key", "*.pem", "*.p12", "*.pfx", "id_rsa", "id_ecdsa", "id_ed25519")
DATABASES = ("*.db", "*.db-*", "*.sqlite", "*.sqlite-*", "*.sqlite3", "*.sqlite3-*")
"""Names that are never uploaded. Other keys and databases are recognized by their first bytes."""

IGNORE_FILES = (".coldpressignore", ".gitignore")
"""Files in the catalog's folder and the current one with patterns of what stays; the first that
matches decides.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """The files of a working directory.

    Attributes:
        files: local files by their names in it.
        catalog: path of the catalog within it.
        left_out: reasons by the names of files and folders that are not uploaded, apart from hidden
            files and caches.
    """

    files: Mapping[str, Path]
    catalog: str | None
    left_out: Mapping[str, str]

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(path.stat().st_size for path in self.files.values())


def gather(
    catalog: str | None, include: Sequence[str], here: Path, *, named: Iterable[Path] = ()
) -> Upload:
    """Return the files of a working directory.

    Args:
        catalog: path of the catalog, None for a registry. An absolute path that does not exist here
            is assumed on the cluster.
        include: further files and folders below `here`, sent even if an ignore file matches them.
        here: current directory.
        named: files and folders that entries of the catalog name, sent like `include`.

    Raises:
        UsageError: a relative path does not exist, or the files are too large.
    """
    here = here.resolve()
    root = Path(str(freezer.__file__)).parents[1]
    collected = _Collected()
    for package in PACKAGES:
        collected.add(root / package, package)
    places, within = {here: Path()}, catalog
    if catalog is not None:
        path = (here / catalog).resolve()
        if path.is_file():
            folder = path.parent
            inner = folder.relative_to(here) if folder.is_relative_to(here) else Path("catalog")
            collected.add(folder, str(inner), _ignore_patterns(folder, here))
            within = str(inner / path.name)
            collected.files[within] = path
            places = {folder: inner, **places}
        elif not Path(catalog).is_absolute():
            raise UsageError(
                f"catalog {catalog!r} does not exist; expected a file on this machine, or an"
                " absolute path on the cluster's head"
            )
    for name in include:
        collected.add_included(name, here)
    for path in named:
        collected.add_named(path, places)
    return collected.upload(within)


def stage(files: Mapping[str, Path], folder: Path) -> None:
    """Put the files into a folder, as hard links if possible."""
    for name, path in files.items():
        link_or_copy(path, folder / name)


_Patterns = Sequence[tuple[Path, str, GitIgnoreSpec]]
"""Patterns of ignore files: folder, name and content of each. The first that matches decides."""


def _ignore_patterns(*folders: Path) -> _Patterns:
    """Read the ignore files of some folders."""
    patterns: list[tuple[Path, str, GitIgnoreSpec]] = []
    for folder in dict.fromkeys(folders):
        for name in IGNORE_FILES:
            path = folder / name
            if path.is_file():
                lines = path.read_text(errors="replace").splitlines()
                patterns.append((folder, name, GitIgnoreSpec.from_lines(lines)))
    return patterns


def _ignored_by(path: Path, patterns: _Patterns) -> str | None:
    """Return the name of the ignore file that matches a path; None if none does."""
    for folder, name, spec in patterns:
        if path.is_relative_to(folder):
            relative = path.relative_to(folder).as_posix()
            ignored = spec.check_file(f"{relative}/" if path.is_dir() else relative).include
            if ignored is not None:
                return name if ignored else None
    return None


class _Collected:
    """The files to upload, and the reasons why others are not, by their names."""

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}
        self.left_out: dict[str, str] = {}

    def add(self, path: Path, name: str, patterns: _Patterns = ()) -> None:
        """Add a file, or the files of a folder."""
        if path.is_file():
            secret = _secret(path)
            if secret:
                self.left_out[name] = secret
            else:
                self.files[name] = path.resolve()
            return
        for entry in sorted(path.iterdir()) if path.is_dir() else ():
            inner = str(Path(name, entry.name))
            is_folder = entry.is_dir()
            if _matches(entry.name, EXCLUDED) or (is_folder and entry.is_symlink()):
                continue
            reason = _kind_of_folder(entry) if is_folder else None
            if reason is None:
                by = _ignored_by(entry, patterns)
                reason = f"matches {by}" if by else None
            if reason:
                self.left_out[inner] = reason
            else:
                self.add(entry, inner, patterns)

    def add_included(self, name: str, here: Path) -> None:
        """Add a file or folder that --include names."""
        path = (here / name).resolve()
        if not path.exists() or not path.is_relative_to(here):
            raise UsageError(f"--include {name!r}: expected a file or folder below {here}")
        self.add(path, str(path.relative_to(here)))

    def add_named(self, path: Path, places: Mapping[Path, Path]) -> None:
        """Add a file or folder that the catalog names, if it is in one of some folders."""
        for folder, inner in places.items():
            if path.is_relative_to(folder):
                self.add(path, str(inner / path.relative_to(folder)))
                return
        self.left_out[str(path)] = "outside of the catalog's folder and the current one"

    def upload(self, catalog: str | None) -> Upload:
        """Return the upload, whose size is checked."""
        files = dict(sorted(self.files.items()))
        left_out = dict(sorted(self.left_out.items()))
        for name in files:
            left_out.pop(name, None)
        upload = Upload(files=files, catalog=catalog, left_out=left_out)
        if upload.size_bytes > MAX_BYTES:
            sizes = {name: path.stat().st_size / 1e6 for name, path in files.items()}
            largest = sorted(sizes, key=lambda name: -sizes[name])[:_NUM_NAMED]
            named = ", ".join(f"{name} ({sizes[name]:.0f} MB)" for name in largest)
            raise UsageError(
                f"the files to upload have {upload.size_bytes / 1e6:.0f} MB, expected at most"
                f" {MAX_BYTES / 1e6:.0f}; the largest are {named}. Put them where the cluster can"
                " read them, and name them in the catalog by absolute path or URL; list the others"
                " in .coldpressignore"
            )
        return upload


def _kind_of_folder(folder: Path) -> str | None:
    """Return why a folder is not uploaded, by its contents."""
    if not os.access(folder, os.R_OK | os.X_OK):
        return "unreadable"
    if (folder / "pyvenv.cfg").is_file() or (folder / "conda-meta").is_dir():
        return "an environment"
    if (folder / ".coldpress").is_dir() or (folder / "oci-layout").is_file():
        return "a store"
    is_artifact = (folder / MANIFEST).is_file() and (folder / "payloads").is_dir()
    return "an artifact" if is_artifact else None


def _secret(path: Path) -> str | None:
    """Return why a file is never uploaded."""
    start = b""
    with contextlib.suppress(OSError), path.open("rb") as file:  # reported when it is staged
        start = file.read(64)
    names = (path.name.lower(), path.resolve().name.lower())
    is_key = start.startswith(b"-----BEGIN") and b"PRIVATE KEY" in start
    if is_key or any(_matches(name, KEYS) for name in names):
        return "a key"
    is_database = start.startswith(b"SQLite format 3\0")
    if is_database or any(_matches(name, DATABASES) for name in names):
        return "a database"
    return None


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def in_job() -> bool:
    """Whether this process is the driver of a submitted job."""
    return JOB_CONFIG in os.environ


def check_absolute(locations: Mapping[str, str]) -> None:
    """Reject relative locations: a job's output would be lost with its temporary folder.

    Args:
        locations: paths or URIs by option.

    Raises:
        UsageError: a location is relative.
    """
    for option, location in locations.items():
        if is_relative(location):
            expected = "an absolute path that all nodes reach"
            if option == "--tracking-uri":
                expected = "a server, or sqlite:////PATH/mlflow.db"
            raise UsageError(
                f"{option} {location!r} is relative, but a job runs in a temporary folder of the"
                f" cluster, deleted with it; expected {expected}"
            )


def is_relative(location: str) -> bool:
    """Whether a path or URI depends on the working directory."""
    scheme, colon, rest = location.partition(":")
    if not colon or "/" in scheme:
        return not location.startswith("/")
    if scheme.startswith("sqlite"):
        return not rest.removeprefix("///").startswith("/")
    return scheme == "file" and not urlparse(location).path.startswith("/")
