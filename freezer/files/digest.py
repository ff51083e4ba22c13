"""SHA-256 digests of bytes and files, and files in archives that are mapped into memory instead of
being unpacked. Imports no torch.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from freezer.errors import IntegrityError
from freezer.files.reading import open_regular

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
