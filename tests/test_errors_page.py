"""docs/errors.md explains every code that the code has, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = re.compile(r"\bCP-[A-Z]+(?:-[A-Z]+)*\b")


def codes_in_code() -> set[str]:
    files = [path for package in ("freezer", "pipeline", "jobs") for path in (ROOT / package).rglob("*.py")]
    return {code for path in files for code in CODE.findall(path.read_text())}


def rows() -> list[list[str]]:
    """The cells of every row of the page's tables."""
    lines = (ROOT / "docs" / "errors.md").read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `CP-")]


def test_the_page_and_the_code_have_the_same_codes() -> None:
    explained = [row[0].strip("`") for row in rows()]
    assert sorted(explained) == sorted(codes_in_code())


def test_every_code_has_a_cause_and_a_remedy() -> None:
    for row in rows():
        assert all(row[-2:]), row[0]
