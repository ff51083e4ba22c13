"""Catalogs of Python objects, with the fields of catalog files."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Required, TypedDict

from freezer.errors import UsageError

PYTHON = "Python"
"""Name of a catalog of Python objects."""

Dims = Mapping[str, Mapping[str, int]]
Function = str | Callable[..., Any]


class CatalogEntry(TypedDict, total=False):
    """One model of a campaign, `pipeline.Entry(name=..., source=...)`, with the fields of
    docs/reference/catalog.md. A function may be given itself, if it is in a module.
    """

    name: Required[str]
    source: Required[Function]
    inputs: Any
    dims: Dims
    samples: str | Path
    args: Mapping[str, Any]
    weights: str
    seed: int
    method: str
    sha256: str
    trust: bool
    files: Sequence[str]
    task_metric: Function
    limits: Mapping[str, float | str]
    objective: str
    precision: Sequence[str]
    accuracy: Mapping[str, Any]
    device_classes: Sequence[str]
    recipes: Sequence[str]
    tags: Mapping[str, str]
    preserve: Sequence[str]
    reset: str
    threads: Sequence[int]
    points: Sequence[Mapping[str, int]]


def as_file(entry: CatalogEntry) -> Any:
    """The entry as a catalog file has it.

    Raises:
        UsageError: a value cannot be part of a catalog.
    """
    return json.loads(json.dumps(entry, default=_text))


def _text(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    if inspect.isfunction(value) and value.__module__ != "__main__":
        return f"python:{value.__module__}:{value.__qualname__}"
    raise UsageError(
        f"got {value!r:.80}, expected values of JSON, paths, and functions of modules that workers"
        " can import; move a function of this notebook or script to a module beside it"
    )
