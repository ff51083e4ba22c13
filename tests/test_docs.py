"""The documentation: links lead somewhere, codes are explained, and options are current."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.markdown import FENCED, anchors

ROOT = Path(__file__).parents[1]


def test_links_lead_somewhere() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert "README.md" in listed
    broken = []
    for name in listed:
        page = ROOT / name
        for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text())):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if "://" in link:
                continue
            if not target.exists() or (
                anchor and target.suffix == ".md" and anchor not in anchors(target.read_text())
            ):
                broken.append(f"{name}: {link}")
    assert broken == []


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


def test_page_of_options_is_current() -> None:
    script = "import runpy; print(end=runpy.run_path('docs/reference/options.py')['page']())"
    written = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    page = (ROOT / "docs" / "reference" / "options.md").read_text()
    assert page == written, "run: .venv/bin/python docs/reference/options.py"
