"""ZIP archives whose files are mapped into memory instead of being unpacked. Imports no torch."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

from freezer.errors import IntegrityError

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
