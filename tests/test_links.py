"""Links between the pages of the documentation lead to files and sections that exist."""

from __future__ import annotations

import re
import subprocess
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
