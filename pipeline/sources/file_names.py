"""Files and folders that the entries of a catalog name by relative paths.

Entries are not checked, and no module is run.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from freezer.files import is_url
from freezer.freezing.sources import FILE_KINDS
from pipeline.catalog import read_file
from pipeline.sources.transfer import module_closure


def named_files(catalog: Path) -> set[Path]:
    """Return the existing sources, samples and listed files of all entries, and the modules of
    their functions with all imports.

    Absolute paths and URLs are left out: they mean the same on every machine.

    Raises:
        CatalogError: the file is not a catalog.
    """
    folder = catalog.resolve().parent
    search_path = list(dict.fromkeys((str(folder), str(Path.cwd()))))
    found: set[Path] = set()
    for record in read_file(catalog):
        if not isinstance(record.value, dict):
            continue
        for name in _names(record.value):
            if not Path(name).is_absolute() and not is_url(name):
                found |= {
                    Path(os.path.normpath(path))
                    for path in glob.glob(str(folder / name), recursive=True)
                }
        for module in _modules(record.value):
            with contextlib.suppress(
                OSError, SyntaxError, ValueError
            ):  # the campaign reports it as a failure of the entry
                found |= module_closure(module, search_path)
    return found


def _names(entry: dict[str, Any]) -> Iterator[str]:
    kind, _, location = str(entry.get("source")).partition(":")
    files = entry.get("files")
    if kind in (*FILE_KINDS, "transformers"):
        yield glob.escape(location)
    if isinstance(entry.get("samples"), str):
        yield glob.escape(entry["samples"])
    if isinstance(files, list | tuple):
        yield from (name for name in files if isinstance(name, str))


def _modules(entry: dict[str, Any]) -> Iterator[str]:
    for field in ("source", "task_metric"):
        kind, _, location = str(entry.get(field)).partition(":")
        if kind == "python":
            yield location.partition(":")[0]
