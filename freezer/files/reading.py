"""Read files that others may have replaced by anything: regular files only, opened without waiting,
at most a limit of bytes. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from freezer.errors import IntegrityError

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
