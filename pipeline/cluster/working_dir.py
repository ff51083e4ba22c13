"""What a submitted job gets: a working directory with the project's packages and the catalog's
folder, and absolute locations.

Files keep their paths relative to the current directory, so `python:examples.models:ranker` and
`samples: data/x.safetensors` mean the same on the cluster. The folder of a catalog outside of the
current directory becomes `catalog/`.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

from pathspec import GitIgnoreSpec

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
"""Files with patterns of what stays; in one folder the first decides."""


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
        include: further files and folders below `here`. They are sent also where an ignore file
            matches them.
        here: current directory.
        named: files and folders that entries of the catalog name, sent like `include`.

    Raises:
        UsageError: a relative path does not exist, or the files are too large; the message names
            the largest.
    """
    import freezer

    here, root = here.resolve(), Path(str(freezer.__file__)).parents[1]
    files: dict[str, Path] = {}
    left_out: dict[str, str] = {}
    for package in PACKAGES:
        _add(root / package, package, files, {})
    places, within = {here: Path()}, catalog
    if catalog is not None and (here / catalog).is_file():
        path = (here / catalog).resolve()
        folder = path.parent.relative_to(here) if path.is_relative_to(here) else Path("catalog")
        _add(path.parent, str(folder), files, left_out, _Ignored(path.parent, here))
        within = str(folder / path.name)
        files[within] = path
        places = {path.parent: folder, **places}
    elif catalog is not None and not Path(catalog).is_absolute():
        raise UsageError(
            f"catalog {catalog!r} does not exist; expected a file on this machine, or an absolute"
            " path on the cluster's head"
        )
    for name in include:
        path = (here / name).resolve()
        if not path.exists() or not path.is_relative_to(here):
            raise UsageError(f"--include {name!r}: expected a file or folder below {here}")
        _add(path, str(path.relative_to(here)), files, left_out)
    for path in named:
        place = next((place for place in places if path.is_relative_to(place)), None)
        if place is None:
            left_out[str(path)] = "outside of the catalog's folder and the current one"
        else:
            _add(path, str(places[place] / path.relative_to(place)), files, left_out)
    _check_size(files)
    left_out = {name: reason for name, reason in sorted(left_out.items()) if name not in files}
    return Upload(files=dict(sorted(files.items())), catalog=within, left_out=left_out)


def stage(files: Mapping[str, Path], folder: Path) -> None:
    """Put the files into a folder, as hard links if possible."""
    for name, path in files.items():
        link_or_copy(path, folder / name)


class _Ignored:
    """Patterns of the ignore files above and below a folder, up to the top of its repository.

    Args:
        folder: whose files are matched.
        here: current directory, the top outside of a repository.
    """

    def __init__(self, folder: Path, here: Path) -> None:
        repository = next(
            (parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), None
        )
        self._top = repository or (here if folder.is_relative_to(here) else folder)
        self._read: dict[Path, list[tuple[str, GitIgnoreSpec]]] = {}

    def by(self, path: Path) -> str | None:
        """Return the name of the file whose pattern ignores a path; None if it is not ignored.

        The nearest pattern decides.
        """
        for parent in path.parents:
            for name, spec in self._specs(parent):
                relative = path.relative_to(parent).as_posix()
                ignored = spec.check_file(f"{relative}/" if path.is_dir() else relative).include
                if ignored is not None:
                    return name if ignored else None
            if parent == self._top:
                break
        return None

    def _specs(self, folder: Path) -> list[tuple[str, GitIgnoreSpec]]:
        if folder not in self._read:
            found = [(name, folder / name) for name in IGNORE_FILES if (folder / name).is_file()]
            self._read[folder] = [
                (name, GitIgnoreSpec.from_lines(path.read_text(errors="replace").splitlines()))
                for name, path in found
            ]
        return self._read[folder]


def _add(
    path: Path,
    name: str,
    files: dict[str, Path],
    left_out: dict[str, str],
    ignored: _Ignored | None = None,
) -> None:
    """Add a file, or the files of a folder, to those uploaded or to those left out."""
    if path.is_file():
        secret = _secret(path)
        if secret:
            left_out[name] = secret
        else:
            files[name] = path.resolve()
        return
    for item in sorted(path.iterdir()) if path.is_dir() else ():
        inner = str(Path(name, item.name))
        if _matches(item.name, EXCLUDED) or (item.is_dir() and item.is_symlink()):
            continue
        reason = _kind_of_folder(item) if item.is_dir() else None
        by = ignored.by(item) if ignored and not reason else None
        if reason or by:
            left_out[inner] = reason or f"matches {by}"
        else:
            _add(item, inner, files, left_out, ignored)


def _kind_of_folder(folder: Path) -> str | None:
    """Return why a folder is not uploaded, by its contents."""
    if not os.access(folder, os.R_OK | os.X_OK):
        return "unreadable"
    if (folder / "pyvenv.cfg").is_file() or (folder / "conda-meta").is_dir():
        return "an environment"
    if (folder / ".coldpress").is_dir() or (folder / "oci-layout").is_file():
        return "a store"
    return (
        "an artifact" if (folder / MANIFEST).is_file() and (folder / "payloads").is_dir() else None
    )


def _secret(path: Path) -> str | None:
    """Return why a file is never uploaded."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError:  # reported when it is staged
        start = b""
    names = {path.name.lower(), path.resolve().name.lower()}
    if any(_matches(name, KEYS) for name in names) or (
        start.startswith(b"-----BEGIN") and b"PRIVATE KEY" in start
    ):
        return "a key"
    return (
        "a database"
        if any(_matches(name, DATABASES) for name in names)
        or start.startswith(b"SQLite format 3\0")
        else None
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _check_size(files: Mapping[str, Path]) -> None:
    sizes = {name: path.stat().st_size for name, path in files.items()}
    total = sum(sizes.values())
    if total > MAX_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:_NUM_NAMED]
        named = ", ".join(f"{name} ({sizes[name] / 1e6:.0f} MB)" for name in largest)
        raise UsageError(
            f"the files to upload have {total / 1e6:.0f} MB, expected at most"
            f" {MAX_BYTES / 1e6:.0f}; the largest are {named}. Put them where the cluster can read"
            " them, and name them in the catalog by absolute path or URL; list the others in"
            " .coldpressignore"
        )


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
            database = option == "--tracking-uri"
            expected = (
                "a server, or sqlite:////PATH/mlflow.db"
                if database
                else "an absolute path that all nodes reach"
            )
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
