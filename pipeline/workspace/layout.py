"""Names of the files and folders that builds and judges leave in a store."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

from freezer.store.store import WORK
from pipeline.workspace.workspace import workplace

WALL_TIME = "wall_s"
"""A file in a candidate's folder: how long its task took, in seconds."""


def candidate_folder(store: str, key: str) -> Path:
    """Where a build's candidate lies."""
    return Path(store) / WORK / "candidates" / key


def build_wall_s(store: str, key: str) -> float:
    """The wall time of a build whose driver died before it could keep that in the ledger; 0 where it is not known."""
    try:
        return float(workplace(store).read("candidates", key, WALL_TIME) or 0.0)
    except (OSError, ValueError):
        return 0.0


def judged_name(key: str, model: str, missing: Collection[str] = ()) -> str:
    """The name of the folder of a judge's result.

    Args:
        key: of the judge.
        model: models that are the same but for their names share a key, and each has an artifact.
        missing: recipes of the key that were not built. They may be another time, or in another campaign: that is another result.
    """
    without = hashlib.sha256(" ".join(sorted(missing)).encode()).hexdigest()[:16]
    return f"{key}-{model}~{without}" if missing else f"{key}-{model}"


def judged_folder(store: str, key: str, model: str, missing: Collection[str] = ()) -> Path:
    """Where a judge's result and artifact lie until they are published; see `judged_name`."""
    return Path(store) / WORK / "judged" / judged_name(key, model, missing)


def log_path(store: str, key: str) -> Path:
    """Where the whole log of a build or judge lies."""
    return Path(store) / WORK / "logs" / f"{key}.log"
