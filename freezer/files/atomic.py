"""Durable, atomic writes: files are written under another name, synced and renamed. Imports no
torch.

Transient errors (of network file systems, of storage arrays that switch paths) are retried here and
nowhere else: TRANSIENT lists them, WAITS_S bounds the retries. A full or read-only disk and missing
permissions fail at once.

A failed write continues where it stopped. A failed sync is not just repeated: Linux may have
dropped the unwritten pages, and then report success for the next sync. So the content is written
again and synced.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_T = TypeVar("_T")

CHUNK_BYTES = 1 << 20

TRANSIENT = frozenset({errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR})
"""Errors after which the same step may succeed: an input/output error, a stale NFS handle, a silent
server.
"""

WAITS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0)
"""Waits between attempts: 10 attempts within 3.3 s.

If one attempt in three fails, one step in 59,000 fails.
"""


def retried(step: Callable[[], _T]) -> _T:
    """Run a repeatable step, again after transient errors.

    Raises:
        OSError: not transient, or raised by every attempt.
    """
    for wait_s in WAITS_S:
        try:
            return step()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            time.sleep(wait_s)
    return step()


def write_whole(
    path: Path,
    data: bytes,
    *,
    mode: int | None = None,
    synced: bool = True,
) -> None:
    """Write or replace a file; it is durable when this returns.

    Args:
        path: in an existing folder.
        data: the whole content.
        mode: permissions; None applies the umask.
        synced: False if losing the file in a crash of the machine is harmless.

    Raises:
        OSError: it cannot be written; the previous file is unchanged.
    """
    with replacing(path, mode) as partial:
        _write(partial, lambda file: file.write(data), synced=synced)
    if synced:
        retried(lambda: _fsync(path.parent))


def copy_whole(
    source: Path,
    dest: Path,
    *,
    mode: int | None = None,
) -> None:
    """Copy a file; the copy is durable when this returns.

    Args:
        source: a file; may be `dest`, to write that again.
        dest: in an existing folder.
        mode: permissions; None applies the umask.

    Raises:
        OSError: it cannot be read or written; the previous file at `dest` is unchanged.
    """

    def copy(file: BinaryIO) -> None:
        with source.open("rb") as content:
            shutil.copyfileobj(content, file, CHUNK_BYTES)

    with replacing(dest, mode) as partial:
        _write(partial, copy)


def link_whole(
    source: Path,
    dest: Path,
    *,
    mode: int | None = None,
) -> None:
    """Make a durable hard link, or a copy if the file system cannot link.

    The mode becomes the source's too.
    """
    try:
        with replacing(dest, mode) as partial:
            retried(lambda: os.link(source, partial))
            _fsync(partial)
    except OSError:  # also a failed sync, after which the content must be written again
        copy_whole(source, dest, mode=mode)


def link_or_copy(source: Path, dest: Path) -> None:
    """Make a hard link at a new path, or a copy if the file system cannot link, without syncing.

    Makes the folder of `dest`.
    """
    make_folder(dest.parent)
    try:
        retried(lambda: os.link(source, dest))
    except OSError:
        retried(lambda: shutil.copyfile(source, dest))


def move(source: Path, dest: Path) -> None:
    """Rename a file or folder atomically."""
    retried(lambda: os.replace(source, dest))


def make_folder(path: Path, *, mode: int = 0o777) -> None:
    """Make a folder and its parents, if missing.

    Raises:
        FileNotFoundError: others deleted it meanwhile.
        FileExistsError: something else has this name.
        OSError: it cannot be made.
    """
    try:
        retried(lambda: path.mkdir(mode, parents=True, exist_ok=True))
    except FileExistsError as error:
        found = Path(error.filename)
        if os.path.lexists(found) and not found.is_dir():
            raise
        raise FileNotFoundError(errno.ENOENT, "deleted while it was made", str(found)) from error


def remove(path: Path) -> None:
    """Remove a file or link, if it exists."""
    retried(lambda: path.unlink(missing_ok=True))


def sync(path: Path) -> None:
    """Make a file written by others durable."""
    try:
        _fsync(path)
    except OSError:  # the content must be written again
        copy_whole(path, path, mode=path.stat().st_mode & 0o7777)


@contextmanager
def replacing(
    path: Path,
    mode: int | None,
) -> Iterator[Path]:
    """Yield a temporary path beside `path`, which the block writes; renamed to `path` at its end,
    removed if it raises.
    """
    partial = path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")
    try:
        yield partial
        if mode is not None:
            partial.chmod(mode)
        move(partial, path)
    except BaseException:
        with suppress(OSError):
            remove(partial)
        raise


class _Raw(io.FileIO):
    """An open file that retries writes at the same position."""

    def write(self, data: ReadableBuffer, /) -> int:
        return retried(lambda: super(_Raw, self).write(data))


def _write(
    path: Path,
    fill: Callable[[BinaryIO], object],
    *,
    synced: bool = True,
) -> None:
    """Write a file with `fill`, which is called again after a transient error of the write or the
    sync.
    """
    handle = retried(
        lambda: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    )

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


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
