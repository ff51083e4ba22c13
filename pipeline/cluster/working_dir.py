"""What a submitted job gets: a working directory with the project's packages and the catalog's folder, and absolute locations.

Files keep their paths relative to the current directory, so `python:examples.models:ranker` and `samples: data/x.safetensors` mean
the same on the cluster. The folder of a catalog outside of the current directory becomes `catalog/`.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlparse

from freezer.errors import UsageError
from freezer.files.atomic import link_or_copy

MAX_BYTES = 500 * 1024 * 1024
"""Limit of a working directory; Ray's own limit is 512 MB including the archive."""

NUM_NAMED = 5
PACKAGES = ("freezer", "pipeline", "jobs")

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable that Ray sets for the driver of a submitted job."""

EXCLUDED = (
    *(".*", "__pycache__", "*.pyc", "node_modules", "*.egg-info"),
    *("mlruns", "mlartifacts", "mlflow.db*", "*.db-journal", "*.db-wal", "*.db-shm"),
)
"""Names that are never uploaded. Stores and virtual environments are recognized by their contents."""


def gather(catalog: str | None, include: Sequence[str], here: Path) -> tuple[dict[str, Path], str | None]:
    """Return the files of a working directory by their names in it, and the catalog's path within it.

    Args:
        catalog: path of the catalog, None for a registry. An absolute path that does not exist here is assumed on the cluster.
        include: further files and folders below `here`.
        here: current directory.

    Raises:
        UsageError: a relative path does not exist, or the files are too large; the message names the largest.
    """
    import freezer

    root = Path(str(freezer.__file__)).parents[1]
    roots = [(root / package, package) for package in PACKAGES]
    within = catalog
    if catalog is not None and (here / catalog).is_file():
        path = (here / catalog).resolve()
        inside = path.is_relative_to(here.resolve())
        folder = str(path.parent.relative_to(here.resolve())) if inside else "catalog"
        roots.append((path.parent, folder))
        within = str(Path(folder, path.name))
    elif catalog is not None and not Path(catalog).is_absolute():
        raise UsageError(
            f"catalog {catalog!r} does not exist; expected a file on this machine, or an absolute path on the cluster's head"
        )
    for name in include:
        path = (here / name).resolve()
        if not path.exists() or not path.is_relative_to(here.resolve()):
            raise UsageError(f"--include {name!r}: expected a file or folder below {here}")
        roots.append((path, str(path.relative_to(here.resolve()))))
    files = dict(sorted(found for path, name in roots for found in _files(path, name)))
    _check_size(files)
    return files, within


def stage(files: Mapping[str, Path], folder: Path) -> None:
    """Put the files into a folder, as hard links if possible."""
    for name, path in files.items():
        link_or_copy(path, folder / name)


def _files(path: Path, name: str) -> Iterator[tuple[str, Path]]:
    if path.is_file():
        yield name, path
        return
    for parent, folders, files in os.walk(path):
        inner = Path(name, Path(parent).relative_to(path))
        folders[:] = [item for item in folders if not _is_excluded(Path(parent, item))]
        for item in files:
            file = Path(parent, item)
            if not _matches(item) and file.is_file():
                yield str(inner / item), file.resolve()


def _is_excluded(folder: Path) -> bool:
    return _matches(folder.name) or (folder / "pyvenv.cfg").is_file() or (folder / ".coldpress").is_dir()


def _matches(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in EXCLUDED)


def _check_size(files: Mapping[str, Path]) -> None:
    sizes = {name: path.stat().st_size for name, path in files.items()}
    total = sum(sizes.values())
    if total > MAX_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:NUM_NAMED]
        named = ", ".join(f"{name} ({sizes[name] / 1e6:.0f} MB)" for name in largest)
        raise UsageError(
            f"the files to upload have {total / 1e6:.0f} MB, expected at most {MAX_BYTES / 1e6:.0f}; the largest are {named}. "
            "Put them where the cluster can read them, and name them in the catalog by absolute path or URL"
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
            expected = "a server, or sqlite:////PATH/mlflow.db" if database else "an absolute path that all nodes reach"
            raise UsageError(
                f"{option} {location!r} is relative, but a job runs in a temporary folder of the cluster, deleted with it; "
                f"expected {expected}"
            )


def is_relative(location: str) -> bool:
    """Whether a path or URI depends on the working directory."""
    scheme, colon, rest = location.partition(":")
    if not colon or "/" in scheme:
        return not location.startswith("/")
    if scheme.startswith("sqlite"):
        return not rest.removeprefix("///").startswith("/")
    return scheme == "file" and not urlparse(location).path.startswith("/")
