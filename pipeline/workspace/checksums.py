"""Whether a candidate is still what was built: digests of its files, noted by the task that built it. Imports no torch.

Without them a bit that flips on the disk between a build and its judge would be the model's own rejection, and final.
"""

from __future__ import annotations

import json
from pathlib import Path

from freezer.files.atomic import write_whole
from freezer.files.digest import digest_file

DIGESTS = "digests.json"
"""In a candidate's folder: by path within it, the digest of every other file."""


def note_digests(folder: Path) -> None:
    """Note what is in a candidate's folder, before it gets its name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != DIGESTS)
    digests = {str(path.relative_to(folder)): digest_file(path) for path in files}
    write_whole(folder / DIGESTS, json.dumps(digests, indent=1).encode())


def damage_of(folder: Path) -> str | None:
    """What is wrong with a candidate's folder, in words; None where all is as it was built, or an earlier release noted nothing."""
    if not folder.is_dir():
        return f"{folder} is gone"
    try:
        digests = json.loads((folder / DIGESTS).read_bytes())
        damaged = [name for name, digest in digests.items() if digest_file(folder / name) != digest]
    except FileNotFoundError as error:
        return None if error.filename == str(folder / DIGESTS) else f"{error.filename} is missing"
    except (OSError, ValueError, AttributeError) as error:
        return f"{folder} cannot be read: {error}"
    return f"{folder / damaged[0]} is not what was built" if damaged else None
