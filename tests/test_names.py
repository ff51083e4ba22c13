"""A public name means one thing: no two public classes share a name, and no two faces of packages
in freezer, or in pipeline, export different objects under one name.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = [file for top in ("freezer", "pipeline", "jobs") for file in (ROOT / top).rglob("*.py")]


def shared(names: Iterator[tuple[str, str]]) -> dict[str, set[str]]:
    """The names that have several origins, each with them."""
    origins: dict[str, set[str]] = defaultdict(set)
    for name, origin in names:
        origins[name].add(origin)
    return {name: places for name, places in origins.items() if len(places) > 1}


def public_classes() -> Iterator[tuple[str, str]]:
    """The public classes, each with its file."""
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, str(file.relative_to(ROOT))


def exports() -> Iterator[tuple[str, str]]:
    """The functions and classes that faces export, each with the module that defines it.

    The names are those of freezer and pipeline apart: both build, judge and compare.
    """
    defined: dict[tuple[str, str], str] = {}
    imports: list[tuple[str, str]] = []
    for file in FILES:
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                defined[module, node.name] = module
            elif isinstance(node, ast.ImportFrom) and file.stem == "__init__":
                imports += [(str(node.module), alias.asname or alias.name) for alias in node.names]
    for origin, name in imports:
        if (origin, name) in defined and not name.startswith("_"):
            yield f"{origin.partition('.')[0]}: {name}", origin


def test_no_two_public_classes_share_a_name() -> None:
    assert not shared(public_classes())


def test_no_two_faces_share_a_name() -> None:
    assert not shared(exports())
