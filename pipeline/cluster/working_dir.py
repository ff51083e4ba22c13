"""What a submitted job gets: a working directory with the project's packages and the files that the
catalog names, and absolute locations.

Nothing else is uploaded: a project's folder has keys, tokens and state of other tools. Files keep
their paths relative to the current directory, so `python:examples.models:ranker` and
`samples: data/x.safetensors` mean the same on the cluster. The folder of a catalog outside of the
current directory becomes `catalog/`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

import freezer
from freezer.errors import UsageError
from freezer.files import link_or_copy

MAX_BYTES = 500 * 1024 * 1024
"""Limit of a working directory; Ray's own limit is 512 MB including the archive."""

_NUM_NAMED = 5
PACKAGES = ("freezer", "pipeline", "jobs")

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable that Ray sets for the driver of a submitted job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """The files of a working directory.

    Attributes:
        files: local files by their names in it.
        catalog: path of the catalog within it.
        left_out: named files that are not uploaded, since they are, or link to, files outside of
            the catalog's folder and the current one.
    """

    files: Mapping[str, Path]
    catalog: str | None
    left_out: Sequence[str]

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
        include: further files and folders below `here`.
        here: current directory.
        named: files and folders that entries of the catalog name.

    Raises:
        UsageError: a relative path does not exist, or the files are too large.
    """
    here = here.resolve()
    root = Path(str(freezer.__file__)).resolve().parents[1]
    collected = _Collected({root: Path()})
    for package in PACKAGES:
        collected.add(root / package)
    collected.places = {here: Path()}
    within = catalog if catalog is None else collected.add_catalog(catalog, here)
    for name in include:
        path = (here / name).resolve()
        if not path.exists() or not path.is_relative_to(here):
            raise UsageError(f"--include {name!r}: expected a file or folder below {here}")
        collected.add(path)
    for path in named:
        collected.add(path)
    return collected.upload(within)


def stage(files: Mapping[str, Path], folder: Path) -> None:
    """Put the files into a folder, as hard links if possible."""
    for name, path in files.items():
        link_or_copy(path, folder / name)


class _Collected:
    """The files to upload, by their names.

    Args:
        places: names of folders in the working directory; only files in them are uploaded.
    """

    def __init__(self, places: Mapping[Path, Path]) -> None:
        self.places = places
        self.files: dict[str, Path] = {}
        self.left_out: set[str] = set()

    def add(self, path: Path) -> None:
        """Add a file, or the files of a folder."""
        for file in _files_in(path):
            real = file.resolve()
            is_inside = any(real.is_relative_to(folder) for folder in self.places)
            folders = [folder for folder in self.places if file.is_relative_to(folder)]
            if is_inside and folders:
                name = self.places[folders[0]] / file.relative_to(folders[0])
                self.files[str(name)] = real
            else:
                self.left_out.add(str(file))

    def add_catalog(self, catalog: str, here: Path) -> str:
        """Add a catalog, unless it is on the cluster; return its path within."""
        path = (here / catalog).resolve()
        if path.is_file():
            folder = path.parent
            inner = folder.relative_to(here) if folder.is_relative_to(here) else Path("catalog")
            self.places = {folder: inner, here: Path()}
            self.add(path)
            return str(inner / path.name)
        if not Path(catalog).is_absolute():
            raise UsageError(
                f"catalog {catalog!r} does not exist; expected a file on this machine, or an"
                " absolute path on the cluster's head"
            )
        return catalog

    def upload(self, catalog: str | None) -> Upload:
        """Return the upload, whose size is checked."""
        files = dict(sorted(self.files.items()))
        upload = Upload(files=files, catalog=catalog, left_out=sorted(self.left_out))
        if upload.size_bytes > MAX_BYTES:
            sizes = {name: path.stat().st_size / 1e6 for name, path in files.items()}
            largest = sorted(sizes, key=lambda name: -sizes[name])[:_NUM_NAMED]
            named = ", ".join(f"{name} ({sizes[name]:.0f} MB)" for name in largest)
            raise UsageError(
                f"the files to upload have {upload.size_bytes / 1e6:.0f} MB, expected at most"
                f" {MAX_BYTES / 1e6:.0f}; the largest are {named}. Put them where the cluster can"
                " read them, and name them in the catalog by absolute path or URL"
            )
        return upload


def _files_in(path: Path) -> Iterator[Path]:
    """Yield a file itself, or the regular files of a folder apart from caches and hidden ones.

    Links to folders are not followed.
    """
    if path.is_file():
        yield path
        return
    for root, folders, names in os.walk(path, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        for name in names:
            file = Path(root, name)
            if not name.startswith(".") and file.is_file():
                yield file


def _refuse(error: OSError) -> None:
    raise UsageError(f"{error.filename} cannot be uploaded ({error.strerror}); make it readable")


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
