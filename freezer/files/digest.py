"""SHA-256 digests of bytes and files, and files in archives that are mapped into memory instead of
being unpacked; and files that others may have replaced by anything. Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from freezer.errors import IntegrityError

CHANGED = "it was changed or damaged: pull it again, or repair the store"


def verify_file(
    path: Path,
    *,
    digest: str,
    size_bytes: int,
    origin: str | None = None,
) -> None:
    """Compare a file with its size and digest.

    Args:
        path: the file.
        digest: `sha256:` and hex.
        size_bytes: expected size.
        origin: where the file comes from, for the message; its path if None.

    Raises:
        IntegrityError: the file is missing or differs.
    """
    name = origin or path
    with artifact_errors(name):
        found_size = path.stat().st_size
        if found_size != size_bytes:
            raise IntegrityError(f"{name} has {found_size} bytes, expected {size_bytes}; {CHANGED}")
        found = digest_file(path)
    if found != digest:
        raise IntegrityError(f"{name} is {found}, expected {digest}; {CHANGED}")


@contextmanager
def artifact_errors(name: object) -> Iterator[None]:
    """Turn errors of the system about a file of an artifact into IntegrityError."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise IntegrityError(f"{name} is missing; pull the artifact again") from None
    except OSError as error:
        raise IntegrityError(
            f"{name} cannot be read: {error.strerror}; pull the artifact again"
        ) from None


def check_digest(digest: str) -> None:
    """Check the form of a digest.

    Raises:
        IntegrityError: it is not `sha256:` and 64 hex digits.
    """
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise IntegrityError(f"{digest!r:.80} is not a sha256 digest")


def digest_bytes(data: bytes) -> str:
    """`sha256:` and the hex digest of bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def digest_file(path: Path) -> str:
    """`sha256:` and the hex digest of a regular file."""
    with open_regular(path) as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


_LOCAL_HEADER = struct.Struct("<4s22xHH")


def begin_of(
    path: Path,
    info: zipfile.ZipInfo,
) -> int:
    """Offset of the bytes of an uncompressed file in an archive.

    Raises:
        IntegrityError: the file is compressed.
    """
    if info.compress_type != zipfile.ZIP_STORED:
        raise IntegrityError(f"{path.name}: {info.filename} is compressed; pull the artifact again")
    with path.open("rb") as file:
        file.seek(info.header_offset)
        _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return int(info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes)


CHUNK_BYTES = 8 << 20

DOCUMENT_BYTES = 64_000_000
"""Largest document: the largest manifests have some MB."""


def open_regular(path: Path, mode: str = "rb") -> FileIO:
    """Open a regular file, without waiting for the other end of a FIFO.

    Args:
        path: the file.
        mode: see `open`.

    Raises:
        IntegrityError: it is a folder, FIFO, socket or device.
        OSError: it cannot be opened.
    """
    if path.exists() and not path.is_file():
        raise IntegrityError(f"{path} is not a regular file; replace it, or repair the store")
    return FileIO(
        path,
        mode,
        opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666),
    )


def chunks_of(file: BinaryIO, limit_bytes: int, origin: object) -> Iterator[bytes]:
    """Read an open file in parts.

    Args:
        file: the file, also pyarrow's.
        limit_bytes: largest size.
        origin: where it comes from, for the message.

    Raises:
        IntegrityError: it is larger.
    """
    limit_bytes = max(limit_bytes, 0)
    while chunk := file.read(min(CHUNK_BYTES, limit_bytes + 1)):
        limit_bytes -= len(chunk)
        if limit_bytes < 0:
            raise IntegrityError(
                f"{origin} is larger than expected; pull it again, or repair the store"
            )
        yield chunk


def read_document(path: Path, limit_bytes: int = DOCUMENT_BYTES) -> bytes:
    """Read a document that nobody has verified yet.

    Raises:
        IntegrityError: it is not a regular file, or larger than the limit.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        return b"".join(chunks_of(file, limit_bytes, path))
