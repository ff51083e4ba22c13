"""Digests of a candidate's files, written by its build and checked by its judge. Imports no torch.

Without them a bit that flips on the disk between the two would become a final rejection of the model.
"""

from __future__ import annotations

import json
from pathlib import Path

from freezer.files.atomic import write_whole
from freezer.files.digest import digest_file

DIGESTS = "digests.json"
"""File in a candidate's folder that contains the digest of every other file, by path."""


def note_digests(folder: Path) -> None:
    """Write the digests of a candidate's files, before the folder is moved to its name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != DIGESTS)
    digests = {str(path.relative_to(folder)): digest_file(path) for path in files}
    write_whole(folder / DIGESTS, json.dumps(digests, indent=1).encode())


def damage_of(folder: Path) -> str | None:
    """Return how a candidate differs from what was built; None if it does not, or if an earlier release wrote no digests."""
    if not folder.is_dir():
        return f"{folder} is missing"
    try:
        digests = json.loads((folder / DIGESTS).read_bytes())
        damaged = [name for name, digest in digests.items() if digest_file(folder / name) != digest]
    except FileNotFoundError as error:
        return None if error.filename == str(folder / DIGESTS) else f"{error.filename} is missing"
    except (OSError, ValueError, AttributeError) as error:
        return f"{folder} cannot be read: {error}"
    return f"{folder / damaged[0]} differs from what was built" if damaged else None
