"""SHA-256 digests of bytes and files. Imports no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from freezer.errors import IntegrityError


def verify_file(path: Path, *, digest: str, size_bytes: int) -> None:
    """Compare a file with its size and digest.

    Raises:
        IntegrityError: the file is missing or differs.
    """
    try:
        found_size = path.stat().st_size
        found = digest_file(path) if found_size == size_bytes else None
    except (FileNotFoundError, NotADirectoryError):
        raise IntegrityError(f"{path} is missing; pull the artifact again") from None
    if found is None:
        raise IntegrityError(f"{path} has {found_size} bytes, expected {size_bytes}; it was changed or damaged: pull it again")
    if found != digest:
        raise IntegrityError(f"{path} is {found}, expected {digest}; it was changed or damaged: pull it again")


def digest_bytes(data: bytes) -> str:
    """`sha256:` and the hex digest of bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def digest_file(path: Path) -> str:
    """`sha256:` and the hex digest of a file."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
