"""Names of the files and folders that builds and judges write into a store."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

from freezer.store.store import WORK
from pipeline.workspace.workspace import workplace

WALL_TIME = "wall_s"
"""File in a candidate's folder: duration of its task, in seconds."""


def candidate_folder(store: str, key: str) -> Path:
    """Return the folder of a build's candidate."""
    return Path(store) / WORK / "candidates" / key


def build_wall_s(store: str, key: str) -> float:
    """Return the duration of a build whose driver died before it wrote a ledger row, in seconds; 0 if unknown."""
    try:
        return float(workplace(store).read("candidates", key, WALL_TIME) or 0.0)
    except (OSError, ValueError):
        return 0.0


def judged_name(key: str, model: str, missing: Collection[str] = ()) -> str:
    """Return the name of the folder of a judge's result.

    Args:
        key: of the judge.
        model: models that differ only in name share a key, but each has an artifact.
        missing: recipes that were not built. A judge that has them is another result.
    """
    without = hashlib.sha256(" ".join(sorted(missing)).encode()).hexdigest()[:16]
    return f"{key}-{model}~{without}" if missing else f"{key}-{model}"


def judged_folder(store: str, key: str, model: str, missing: Collection[str] = ()) -> Path:
    """Return the folder of a judge's result and artifact until they are published; see `judged_name`."""
    return Path(store) / WORK / "judged" / judged_name(key, model, missing)


def log_path(store: str, key: str) -> Path:
    """Return the path of the whole log of a build or judge."""
    return Path(store) / WORK / "logs" / f"{key}.log"
