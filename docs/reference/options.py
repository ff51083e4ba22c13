"""Write options.md, the help of every command: `.venv/bin/python docs/reference/options.py`."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["TYPER_USE_RICH"] = "0"  # read when typer is imported

import typer

from freezer.cli.app import app

PAGE = Path(__file__).with_suffix(".md")

WIDTH = 100


def page() -> str:
    """The page: a section for each command, in the order of `coldpress --help`."""
    group = typer.main.get_group(app)
    context = typer.Context(
        group, info_name="coldpress", terminal_width=WIDTH, max_content_width=WIDTH
    )
    sections = ["# Options", "The help of each command, written by `docs/reference/options.py`."]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        text = command.get_help(typer.Context(command, info_name=name, parent=context))
        sections += [f"## {name}", f"```\n{text}\n```"]
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
