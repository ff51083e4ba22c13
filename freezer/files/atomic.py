"""Durable writes: a file is written aside, synced and renamed, so that it is there whole or not at all. Imports no torch.

What a disk refuses for a moment (a network's file system, a storage array that changes its path) is tried again, here and nowhere
else, a bounded number of times: TRANSIENT says which errors, WAITS_S how often and how long. A full or read-only disk and a missing
permission are final at once.

A write goes on from where it failed, so that a long file comes to its end too. A sync that failed is not simply repeated: Linux may
have dropped what could not be written, and says of the next sync that all is well. So the content is written again, then synced.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_T = TypeVar("_T")

CHUNK_BYTES = 1 << 20

TRANSIENT = frozenset({errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR})
"""Errors after which a disk may do the same step well: an input/output error, a stale handle of NFS, a server that is silent."""

WAITS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0)
"""Between two attempts at one step: 10 attempts within 3.3 s. Where every attempt in three fails, one step in 59,000 fails."""


def is_transient(error: OSError) -> bool:
    """Whether an attempt at the same step may go well in a moment."""
    return error.errno in TRANSIENT


def retried(step: Callable[[], _T]) -> _T:
    """What a step returns; after a transient error it is done again, so it must be one that may be.

    Raises:
        OSError: it is not transient, or was met at every attempt.
    """
    for wait_s in WAITS_S:
        try:
            return step()
        except OSError as error:
            if not is_transient(error):
                raise
            time.sleep(wait_s)
    return step()


def write_whole(path: Path, data: bytes, *, mode: int | None = None, synced: bool = True) -> None:
    """Write a file, or put another in its place; it is on the disk when this returns.

    Args:
        path: in a folder that exists.
        data: all of it.
        mode: permissions; None leaves what the process's umask gives.
        synced: False where a file that is lost with its machine is no loss.

    Raises:
        OSError: it cannot be written; what was there before is there still, and nothing else.
    """
    partial = _aside(path)
    try:
        _write(partial, lambda file: file.write(data), synced=synced)
        if mode is not None:
            partial.chmod(mode)
        move(partial, path)
    except BaseException:
        _discard(partial)
        raise
    if synced:
        sync_folder(path.parent)


def copy_whole(source: Path, dest: Path, *, mode: int | None = None, check: Callable[[Path], object] | None = None) -> None:
    """Give a file a copy, which is on the disk when this returns.

    Args:
        source: a file; `dest` itself, to have it written anew.
        dest: in a folder that exists.
        mode: permissions of the copy; None leaves what the process's umask gives.
        check: is given the copy before it has its name, and raises if it is not right.

    Raises:
        OSError: it cannot be read or written; what was at `dest` before is there still.
    """
    partial = _aside(dest)

    def copy(file: BinaryIO) -> None:
        with source.open("rb") as content:
            shutil.copyfileobj(content, file, CHUNK_BYTES)

    try:
        _write(partial, copy)
        if check is not None:
            check(partial)
        if mode is not None:
            partial.chmod(mode)
        move(partial, dest)
    except BaseException:
        _discard(partial)
        raise


def link_whole(source: Path, dest: Path, *, mode: int | None = None, check: Callable[[Path], object] | None = None) -> None:
    """Give a file a second name, which is on the disk when this returns; copy it where the file system cannot.

    Args:
        source, dest, mode: as of `copy_whole`; the mode becomes the source's too.
        check: as of `copy_whole`, of what had to be copied.
    """
    partial = _aside(dest)
    try:
        _link(source, partial)
        if mode is not None:
            partial.chmod(mode)
        _fsync(partial)
        move(partial, dest)
    except OSError:  # what could not be linked is copied, and what could not be synced written again
        _discard(partial)
        copy_whole(source, dest, mode=mode, check=check)
    except BaseException:
        _discard(partial)
        raise


def link_or_copy(source: Path, dest: Path) -> None:
    """Give a file a second name, or copy it where the file system cannot; neither is synced.

    Args:
        source: a file.
        dest: that does not exist; its folder is made.
    """
    make_folder(dest.parent)
    try:
        _link(source, dest)
    except OSError:
        retried(lambda: shutil.copyfile(source, dest))


def move(source: Path, dest: Path) -> None:
    """Give a file or folder another name in one step.

    Raises:
        OSError: it cannot be moved.
    """
    _retried_once_done(lambda: os.replace(source, dest), done=lambda: not source.exists() and dest.exists())


def make_folder(path: Path, *, mode: int = 0o777) -> None:
    """Make a folder, and those above it, unless it is there.

    Raises:
        OSError: it cannot be made.
    """
    retried(lambda: path.mkdir(mode, parents=True, exist_ok=True))


def remove(path: Path) -> None:
    """Remove a file or link, unless it is gone.

    Raises:
        OSError: it cannot be removed.
    """
    retried(lambda: path.unlink(missing_ok=True))


def sync(path: Path) -> None:
    """Wait until the content of a file that others have written is on the disk.

    Raises:
        OSError: it cannot be written.
    """
    try:
        _fsync(path)
    except OSError as error:
        if not is_transient(error):
            raise
        copy_whole(path, path, mode=path.stat().st_mode & 0o7777)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk.

    Raises:
        OSError: they cannot be written.
    """
    retried(lambda: _fsync(path))


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")


def _discard(partial: Path) -> None:
    """Remove what was begun; whoever writes there next looks for what could not be removed."""
    with contextlib.suppress(OSError):
        remove(partial)


class _Raw(io.FileIO):
    """An open file; a write that failed for a moment is done again, at the same place."""

    def write(self, data: ReadableBuffer, /) -> int:
        return retried(lambda: super(_Raw, self).write(data))


def _write(path: Path, fill: Callable[[BinaryIO], object], *, synced: bool = True) -> None:
    """Write a file by a function, which is called again when its content, or the sync of that, could not be written."""
    handle = retried(lambda: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666))

    def write() -> None:
        os.lseek(handle, 0, os.SEEK_SET)
        os.ftruncate(handle, 0)
        with io.BufferedWriter(_Raw(handle, "wb", closefd=False), CHUNK_BYTES) as file:
            fill(file)
        if synced:
            os.fsync(handle)

    try:
        retried(write)
    finally:
        os.close(handle)


def _link(source: Path, dest: Path) -> None:
    _retried_once_done(lambda: os.link(source, dest), done=lambda: dest.samefile(source))


def _retried_once_done(step: Callable[[], object], *, done: Callable[[], bool]) -> None:
    """Retry a step that cannot be done twice: of an attempt that was carried out, the answer alone may have been lost."""
    tried = False

    def attempt() -> None:
        nonlocal tried
        again, tried = tried, True
        try:
            step()
        except (FileNotFoundError, FileExistsError):
            if not (again and done()):
                raise

    retried(attempt)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
