"""What torch says of itself, kept for each torch that is installed on this machine: importing it takes seconds, of every node of a
campaign that has nothing left to do.

    $XDG_CACHE_HOME/coldpress/torch/<which torch>.json       ~/.cache where XDG_CACHE_HOME is not set

It may be removed at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from freezer.blob_cache import cache_folder
from freezer.durable import write_whole

FILES = ("version.py", "lib/libtorch_cpu.so", "lib/libtorch.so")
"""In torch's folder; another build of torch has others, by size or time."""


def known_versions() -> Mapping[str, str | None] | None:
    """What the torch that is installed said of itself (`freezer.toolchain.torch_versions`); None where it is to be asked."""
    path = _path()
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_bytes()) if path is not None else None
        if isinstance(found, dict) and found.keys() == {"torch", "onednn", "cuda"}:
            return found
    return None


def keep_versions(versions: Mapping[str, str | None]) -> None:
    """Keep what the torch that is installed says of itself, where that can be written."""
    path = _path()
    if path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(versions).encode(), synced=False)


def _path() -> Path | None:
    """Where the versions of the torch that would be imported are kept; None where there is none, or it has no files of its own."""
    with contextlib.suppress(ImportError, ValueError, OSError, RuntimeError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent
            facts = [(name, stat.st_size, stat.st_mtime_ns) for name in FILES for stat in [(folder / name).stat()]]
            which = hashlib.sha256(repr((sys.version, str(folder), facts)).encode()).hexdigest()
            return cache_folder() / "torch" / f"{which}.json"
    return None
