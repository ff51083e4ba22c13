"""Rules of style that no linter has: nested expressions, and what tests import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPREHENSION = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
NESTED = (
    (COMPREHENSION, COMPREHENSION),
    (COMPREHENSION, ast.NamedExpr),
    (ast.IfExp, ast.IfExp),
)
"""Pairs of an expression and one that must not be inside it."""


def trees(*tops: str) -> Iterator[tuple[str, ast.Module]]:
    """The modules below folders, each with its path in the repository."""
    for top in tops:
        for file in sorted((ROOT / top).rglob("*.py")):
            yield str(file.relative_to(ROOT)), ast.parse(file.read_text())


def test_no_nested_comprehensions_or_conditions() -> None:
    offenders = set()
    for path, tree in trees("freezer", "pipeline", "jobs"):
        for outer in ast.walk(tree):
            for inner in ast.walk(outer):
                for kind, inside in NESTED:
                    if inner is not outer and isinstance(outer, kind) and isinstance(inner, inside):
                        offenders.add(f"{path}:{inner.lineno}")
    assert sorted(offenders) == []


def test_tests_import_no_tests_and_no_benchmarks() -> None:
    """Shared parts are in tests/support."""
    offenders = []
    for path, tree in trees("tests"):
        for node in ast.walk(tree):
            module = getattr(node, "module", None) or ""
            of_tests = module.startswith("tests.") and ".test_" in module
            of_benchmarks = module.split(".")[0] == "benchmarks"
            if of_tests or of_benchmarks:
                offenders.append(f"{path}:{node.lineno}")  # type: ignore[attr-defined]
    assert offenders == []
