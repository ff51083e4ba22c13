"""docs/reference/errors.md explains exactly the error codes in the source."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = re.compile(r"\bCP-[A-Z]+(?:-[A-Z]+)*\b")


def test_every_code_has_a_cause_and_a_remedy() -> None:
    files = [
        path
        for package in ("freezer", "pipeline", "jobs")
        for path in (ROOT / package).rglob("*.py")
    ]
    codes = {code for path in files for code in CODE.findall(path.read_text())}
    lines = (ROOT / "docs" / "reference" / "errors.md").read_text().splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| `CP-")
    ]
    assert sorted(row[0].strip("`") for row in rows) == sorted(codes)
    for row in rows:
        assert all(row[-2:]), row[0]
