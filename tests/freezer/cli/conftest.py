"""The command `coldpress` in the process of a test."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from freezer.cli.app import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def coldpress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coldpress", *(str(argument) for argument in arguments)])
        with pytest.raises(SystemExit) as caught:  # typer raises it after every command
            main()
        found = capsys.readouterr()
        return int(caught.value.code or 0), found.out, found.err

    return run
