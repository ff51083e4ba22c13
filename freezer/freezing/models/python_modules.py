"""Python modules that catalogs name: found beside the catalog without importing anything, or imported for their functions."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from freezer.errors import SourceError


def find_function(location: str, search_path: Sequence[str]) -> Callable[..., Any]:
    """The function that `MODULE:FUNCTION` names.

    Raises:
        SourceError: there is no such module or function, or the module cannot be imported.
    """
    module_name, _, function_name = location.partition(":")
    with on_path(search_path):
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise SourceError(f"module {module_name!r} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = ", ".join(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
        raise SourceError(f"module {module_name!r} has no function {function_name!r}; it has: {known or 'none'}")
    return function  # type: ignore[no-any-return]


def module_file(module_name: str, search_path: Sequence[str]) -> Path | None:
    """The file of a module, found without importing anything; None when there is none."""
    folders: Sequence[str] | None = [*search_path, *sys.path]
    spec = None
    parts = module_name.split(".")
    for part in parts:  # by its last name alone: the whole one is looked up among imported packages
        spec = PathFinder.find_spec(part, folders) if folders is not None else None
        if spec is None:
            return None
        folders = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.origin else None


@contextlib.contextmanager
def on_path(folders: Sequence[str]) -> Iterator[None]:
    """Look for modules in these folders first."""
    added = [folder for folder in folders if folder not in sys.path]
    sys.path[:0] = added
    try:
        yield
    finally:
        for folder in added:
            with contextlib.suppress(ValueError):
                sys.path.remove(folder)
