"""Check the places for results before any work starts, and paths inside artifacts. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from freezer.errors import IntegrityError, UsageError


def check_folder(path: Path, name: str) -> None:
    """Check that a new folder can be written; makes nothing.

    Args:
        path: must not exist, or be an empty folder.
        name: the option or argument, for messages.

    Raises:
        UsageError: it is a file, a folder with content or the working directory, or cannot be written.
    """
    try:
        there = _is_there(path)
        if there and (path.is_symlink() or not path.is_dir()):
            raise UsageError(f"{name} {path} is a file or a link; name a new folder")
        if path.name == "..":
            raise UsageError(f"{name} {path} ends in `..`; name the new folder itself")
        if there and path.samefile("."):
            raise UsageError(f"{name} {path} is the working directory, which cannot be replaced; name a new folder")
        if there and any(path.iterdir()):
            raise UsageError(f"{name} {path} is not empty; name a new folder")
        _check_above(path, name)
    except (OSError, ValueError) as error:  # a name that is too long, a folder that may not be read, a NUL
        raise UsageError(f"{name} {str(path)!r} cannot be written: {_why(error)}; name another folder") from None


def check_file(path: Path, name: str) -> None:
    """Check that a file can be written or replaced; makes nothing.

    Args:
        path: the file.
        name: the option, for messages.

    Raises:
        UsageError: it is a folder, or cannot be written.
    """
    try:
        if _is_there(path) and path.is_dir():
            raise UsageError(f"{name} {path} is a folder; name a file")
        _check_above(path, name)
    except (OSError, ValueError) as error:
        raise UsageError(f"{name} {str(path)!r} cannot be written: {_why(error)}; name another file") from None


def made_parent(path: Path) -> Path:
    """Make the parent folder, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _why(error: OSError | ValueError) -> str:
    """The system's error without the path."""
    return str(getattr(error, "strerror", None) or error)


def _is_there(path: Path) -> bool:
    """Whether a path exists, dangling links included; raises for invalid paths."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _check_above(path: Path, name: str) -> None:
    """Check the nearest existing parent, in which missing folders will be made."""
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise UsageError(f"{name} {path}: {above} is not a folder; name a path inside a folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UsageError(f"{name} {path}: no permission to write into {above}; name another path")


def check_inside(path: str, *, origin: str) -> None:
    """Check that a path stays inside the artifact's folder.

    Raises:
        IntegrityError: it is absolute or contains `..`.
    """
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts or "\\" in path:
        raise IntegrityError(f"{origin} names {path!r}, which is outside the artifact's folder")
