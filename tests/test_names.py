"""A name means one thing: no two modules, packages' first modules aside, and no two public classes
share one.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = [
    file for top in ("freezer", "pipeline", "jobs") for file in sorted((ROOT / top).rglob("*.py"))
]


def shared(names: list[tuple[str, Path]]) -> dict[str, list[str]]:
    """The names that several files have, each with its files."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, file in names:
        places[name].append(str(file.relative_to(ROOT)))
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_two_modules_share_a_name() -> None:
    assert not shared([(file.stem, file) for file in FILES if not file.stem.startswith("__")])


def test_no_two_public_classes_share_a_name() -> None:
    classes = [
        (node.name, file)
        for file in FILES
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert not shared(classes)
