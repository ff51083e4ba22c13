"""The documentation: links lead somewhere, codes are explained, and options are current."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest
import typer

import freezer
from freezer.artifact import Artifact
from freezer.cli.app import app
from freezer.store import Store
from tests.support.commands import finished, output
from tests.support.markdown import FENCED, anchors
from tests.support.raylets import ROOT
from tests.support.steps import HERE, QUICK_OPTIONS


def test_links_lead_somewhere() -> None:
    listed = output("git", "ls-files", "*.md").split()
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
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "reference" / "errors.md").read_text().splitlines()
        if line.startswith("| `CP-")
    ]
    assert sorted(row[0].strip("`") for row in rows) == sorted(codes)
    for row in rows:
        assert all(row[-2:]), row[0]


def test_page_of_options_is_current() -> None:
    script = "import runpy; print(end=runpy.run_path('docs/reference/options.py')['page']())"
    written = output(sys.executable, "-c", script)
    page = (ROOT / "docs" / "reference" / "options.md").read_text()
    assert page == written, "run: .venv/bin/python docs/reference/options.py"


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYTHON = re.compile(r"(?ms)^```python\n(.*?)^```")

INDEX = r"pip install[^#`&]*[ '\"]coldpress(?![\w/-])|\bcoldpress\[|python -m jobs\b"
"""What nobody should type: Coldpress is on no package index, and a folder may have its own jobs."""


def test_nobody_is_sent_to_an_index_or_jobs() -> None:
    places = (":!tests", ":!benchmarks/results", ":!CHANGELOG.md")
    found = finished("git", "grep", "-nP", INDEX, "--", *places, cwd=ROOT)
    assert (found.returncode, found.stdout) == (1, "")


def test_commands_of_pages_parse() -> None:
    """Those of `coldpress`, with options that exist; and blocks of Python."""
    group = typer.main.get_group(app)
    context = typer.Context(group, info_name="coldpress")
    for page in PAGES:
        for block in PYTHON.findall(page.read_text()):
            compile(block, page, "exec")
        text = "\n".join(FENCED.findall(page.read_text())).replace("\\\n", " ")
        for line in re.findall(r"^(?:\$ )?coldpress (.*)$", text, re.MULTILINE):
            words = shlex.shlex(line, posix=True, punctuation_chars=True)
            words.whitespace_split = True
            name, *arguments = takewhile(lambda word: set(word) - set("&|>;"), words)
            command = group.get_command(context, name)
            command.make_context(name, arguments, parent=context)  # type: ignore[union-attr]


def test_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a quick judge and one recipe; its own model is published as that of the demo."""
    quick = replace(QUICK_OPTIONS, recipes=["torchscript-frozen"])
    monkeypatch.setitem(freezer.freeze.__kwdefaults__, "options", quick)  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    one, deploy = PYTHON.findall(PAGES[0].read_text())
    exec(one, {})
    assert capsys.readouterr().out.startswith("published - ")
    store = Store.open("store", create=True)
    store.publish("digits", source_key="key", artifacts=[Artifact.read(Path("frozen/model"))])
    exec(deploy, {})
    assert HERE in capsys.readouterr().out
