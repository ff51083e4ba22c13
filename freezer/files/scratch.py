"""Folders outside of stores: the user's cache, temporary files, and checks of places for results
before any work starts. Imports no torch.
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from freezer.errors import UsageError

VARIABLE = "COLDPRESS_TMPDIR"
"""Environment variable that names the folder for temporary files."""


PREFIX = "coldpress-scratch-"
"""Of the names of temporary folders. Each is locked by its owner, also against systemd-tmpfiles."""


def cache_folder() -> Path:
    """The cache folder of this user: $XDG_CACHE_HOME/coldpress, by default ~/.cache/coldpress."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "coldpress"


@contextmanager
def scratch_folder(*, executable: bool = False, place: Path | None = None) -> Iterator[Path]:
    """Make a temporary folder, which is removed after the block; if this process is killed, by the
    next one that makes a folder in the same place.

    Args:
        executable: see `scratch_place`.
        place: an existing folder; None for `scratch_place`.

    Raises:
        UsageError: no place can be written.
    """
    place = place or scratch_place(executable=executable)
    _remove_remains(place)
    with ExitStack() as stack:
        while True:
            made = tempfile.TemporaryDirectory(prefix=PREFIX, dir=place)
            folder = Path(stack.enter_context(made))
            with suppress(OSError):  # NFS has no locks of folders
                _lock(folder, fcntl.LOCK_SH, stack)
            if folder.exists():  # another process may remove it before it is locked
                break
        yield folder


@functools.cache
def _remove_remains(place: Path) -> None:
    """Remove the folders of dead processes, which left no lock."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError), ExitStack() as stack:
            _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB, stack)
            shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: str | Path, operation: int, stack: ExitStack) -> None:
    handle = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW)
    stack.callback(os.close, handle)
    fcntl.flock(handle, operation)


def scratch_place(*, executable: bool = False) -> Path:
    """An existing folder in which temporary files can be written: $COLDPRESS_TMPDIR, else the
    system's, else the user's cache.

    Args:
        executable: code will be loaded from the files, which file systems mounted with `noexec`
            refuse.

    Raises:
        UsageError: there is none; the message has the cause for each folder.
    """
    given = os.environ.get(VARIABLE)
    own: list[Callable[[], str | Path]] = [tempfile.gettempdir, lambda: cache_folder() / "tmp"]
    problems = []
    for place in [lambda: str(given)] if given else own:
        try:
            folder = Path(place())
            folder.mkdir(
                parents=True,
                exist_ok=True,
            )
            _try(folder, executable=executable)
            return folder
        except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
            problems.append(str(error))
    needed = "allows code to be loaded from its files" if executable else "can be written"
    raise UsageError(
        f"no temporary folder {needed}: {'; '.join(problems)}; set {VARIABLE} to a folder that"
        " does",
        code="CP-TEMPORARY",
    )


def _try(folder: Path, *, executable: bool) -> None:
    """Write a temporary file, and map it for execution as dlopen does."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
            file.flush()
            if executable:
                mmap.mmap(
                    file.fileno(), 1, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC
                ).close()
    except OSError as error:
        noexec = executable and os.statvfs(folder).f_flag & os.ST_NOEXEC
        raise OSError(f"{folder}: {'mounted with noexec' if noexec else error.strerror}") from error


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
    if path.exists() and (path.samefile(".") or any(path.iterdir())):
        raise UsageError(f"{name} {path} is not empty or the working directory; name a new folder")
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
