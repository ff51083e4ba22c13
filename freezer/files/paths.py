"""Where results go: what a user named is checked before any work is done for it, and made when there is something to write.

Imports no torch.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from freezer.errors import IntegrityError, UsageError


def check_folder(path: Path, name: str) -> None:
    """Refuse a place where no new folder can be written; nothing is made yet.

    Args:
        path: the folder that will be written in one step: it must not exist, or be empty.
        name: of the option or argument that named it, for the message.

    Raises:
        UsageError: it holds something, is no folder, is the working directory itself, or lies where nothing can be written.
    """
    try:
        there = _is_there(path)
        if there and (path.is_symlink() or not path.is_dir()):
            raise UsageError(f"{name} {path} is a file or a link; name a new folder")
        if path.name == "..":
            raise UsageError(f"{name} {path} ends in `..`; name the new folder itself")
        if there and path.samefile("."):
            raise UsageError(f"{name} {path} is the working directory, which no finished folder can replace; name a new folder")
        if there and any(path.iterdir()):
            raise UsageError(f"{name} {path} is not empty; name a new folder")
        _check_above(path, name)
    except (OSError, ValueError) as error:  # a name that is too long, a folder that may not be read, a NUL
        raise UsageError(f"{name} {str(path)!r} cannot be written: {_why(error)}; name another folder") from None


def check_file(path: Path, name: str) -> None:
    """Refuse a place where no file can be written; nothing is made yet, and what is there stays until it is replaced.

    Args:
        path: the file that will be written.
        name: of the option that named it, for the message.

    Raises:
        UsageError: it is a folder, or lies where nothing can be written.
    """
    try:
        if _is_there(path) and path.is_dir():
            raise UsageError(f"{name} {path} is a folder; name a file")
        _check_above(path, name)
    except (OSError, ValueError) as error:
        raise UsageError(f"{name} {str(path)!r} cannot be written: {_why(error)}; name another file") from None


def made_parent(path: Path) -> Path:
    """The same path, whose parent folder is there now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _why(error: OSError | ValueError) -> str:
    """What the system says of a path, without the path."""
    return str(getattr(error, "strerror", None) or error)


def _is_there(path: Path) -> bool:
    """Whether a path is anything at all, a link to nothing among it; what the system cannot even be asked for raises."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _check_above(path: Path, name: str) -> None:
    """Hold the nearest folder above a path that exists: what lies between will be made in it."""
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise UsageError(f"{name} {path}: {above} is no folder; name a path within one")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UsageError(f"{name} {path}: nothing may be written into {above}; name another path")


def check_inside(path: str, *, origin: str) -> None:
    """Refuse a path that would leave the artifact's folder.

    Raises:
        IntegrityError: the path is absolute or climbs.
    """
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts or "\\" in path:
        raise IntegrityError(f"{origin} names {path!r}, which is outside the artifact's folder")
