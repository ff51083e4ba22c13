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
from itertools import chain
from pathlib import Path
from urllib.parse import urlparse

import freezer
from freezer.codec import frozen
from freezer.errors import UsageError
from freezer.files import link_or_copy

PACKAGES = ("freezer", "pipeline", "jobs")

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable that Ray sets for the driver of a submitted job."""


@frozen
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
        UsageError: a path does not exist or cannot be read, or has the name of one of ours.
    """
    here = here.resolve()
    root = Path(str(freezer.__file__)).resolve().parents[1]
    own, _ = _placed([root / package for package in PACKAGES], {root: Path()})
    shipped = set(own.values())  # which modules of a catalog may import
    paths = [_included(name, here) for name in include]
    paths += [path for path in named if path.resolve() not in shipped]
    places = {here: Path()}
    if catalog is not None:
        path = (here / catalog).resolve()
        if path.is_file():
            folder = path.parent
            inner = folder.relative_to(here) if folder.is_relative_to(here) else Path("catalog")
            places = {folder: inner, **places}
            paths.append(path)
            catalog = str(inner / path.name)
        elif not Path(catalog).is_absolute():
            raise UsageError(
                f"catalog {catalog!r} does not exist; expected a file on this machine, or an"
                " absolute path on the cluster's head"
            )
    files, left_out = _placed(paths, places)
    for name, path in own.items():
        if files.get(name, path) != path:
            raise UsageError(f"{files[name]} would replace Coldpress's {name}; rename its folder")
    return Upload(files=dict(sorted((own | files).items())), catalog=catalog, left_out=left_out)


def _included(name: str, here: Path) -> Path:
    path = (here / name).resolve()
    if not path.exists() or not path.is_relative_to(here):
        raise UsageError(f"--include {name!r}: expected a file or folder below {here}")
    return path


def _placed(
    paths: Iterable[Path], places: Mapping[Path, Path]
) -> tuple[dict[str, Path], list[str]]:
    """Return the files at some paths, by their names in the working directory, and those that are
    or link outside of all places.

    Args:
        paths: files and folders.
        places: names of folders in the working directory.
    """
    files = {}
    left_out = set()
    for file in chain.from_iterable(map(_files_in, paths)):
        real = file.resolve()
        is_inside = any(real.is_relative_to(folder) for folder in places)
        folders = [folder for folder in places if file.is_relative_to(folder)]
        if is_inside and folders:
            files[str(places[folders[0]] / file.relative_to(folders[0]))] = real
        else:
            left_out.add(str(file))
    return files, sorted(left_out)


def stage(files: Mapping[str, Path], folder: Path) -> None:
    """Put the files into a folder, as hard links if possible."""
    for name, path in files.items():
        link_or_copy(path, folder / name)


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
            raise UsageError(
                f"{option} {location!r} is relative, but a job runs in a temporary folder of the"
                " cluster, deleted with it; expected a server, or an absolute path that all nodes"
                " reach (of a database, sqlite:////PATH/mlflow.db)"
            )


def is_relative(location: str) -> bool:
    """Whether a path or URI depends on the working directory."""
    scheme, colon, rest = location.partition(":")
    if not colon or "/" in scheme:
        return not location.startswith("/")
    if scheme.startswith("sqlite"):
        return not rest.removeprefix("///").startswith("/")
    return scheme == "file" and not urlparse(location).path.startswith("/")
