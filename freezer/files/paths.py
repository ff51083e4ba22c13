"""Check the places for results before any work starts. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from freezer.errors import UsageError


def check_folder(path: Path, name: str) -> None:
    """Check that a new folder can be written; makes nothing.

    Args:
        path: must not exist, or be an empty folder.
        name: the option or argument, for messages.

    Raises:
        UsageError: it is a file, a folder with content or the working directory, or cannot be
            written.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UsageError(f"{name} {path} is a file or a link; name a new folder")
    if path.exists() and path.samefile("."):
        raise UsageError(
            f"{name} {path} is the working directory, which cannot be replaced; name a new folder"
        )
    if path.exists() and any(path.iterdir()):
        raise UsageError(f"{name} {path} is not empty; name a new folder")
    _check_above(path, name)


def check_file(path: Path, name: str) -> None:
    """Check that a file can be written or replaced; makes nothing.

    Args:
        path: the file.
        name: the option, for messages.

    Raises:
        UsageError: it is a folder, or cannot be written.
    """
    if path.is_dir():
        raise UsageError(f"{name} {path} is a folder; name a file")
    _check_above(path, name)


def _check_above(path: Path, name: str) -> None:
    """Check the nearest existing parent, in which missing folders will be made."""
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise UsageError(f"{name} {path}: {above} is not a folder; name a path inside a folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UsageError(f"{name} {path}: no permission to write into {above}; name another path")
