"""What people see while a campaign runs: lines, and the live view."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipeline.records import verdict_text
from pipeline.reporting import ItemWork, LineDisplay, display_for
from pipeline.reporting.display import LiveDisplay
from tests.support.past_outcomes import CRASH, EVENTS, FAILED, WORK


def lines_of() -> list[str]:
    """The lines of EVENTS without their times."""
    console = Console(file=io.StringIO(), width=80)
    with LineDisplay(console, verbose=False) as display:
        display.plan(3, [*WORK, ItemWork(what="n portable")])
        for event in EVENTS:
            display.show(event)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.split(maxsplit=1)[1] for line in text.splitlines()]


def test_lines_are_one_for_each_item_and_step() -> None:
    lines = lines_of()
    assert lines[:4] == [
        "3 outcomes to reach, 3 builds to do",
        "build m cpu-x86-64-v4",
        "build m portable",
        "judge m cpu-x86-64-v4",
    ]
    assert lines[4].startswith(
        f"outcome m cpu-x86-64-v4 {verdict_text(FAILED)} (1 of 3 done, about "
    )
    assert CRASH.message not in lines[4], "the report prints it, once"
    assert len(lines) == 5


def test_live_view_shows_outcomes_and_running_items() -> None:
    console = Console(file=io.StringIO(), width=80)
    display = LiveDisplay(console)
    display.plan(5, WORK)

    def drawn() -> str:
        with console.capture() as capture:
            console.print(display._bars)
        return capture.get()

    for event in EVENTS[:4]:
        display.show(event)
    assert "0/5" in drawn()
    assert "build m cpu-x86-64-v4" in drawn()
    for event in EVENTS[4:]:
        display.show(event)
    assert "1/5" in drawn()
    assert "m cpu-x86-64-v4" not in drawn()
    assert verdict_text(FAILED) in console.file.getvalue()  # type: ignore[attr-defined]


def test_pipes_get_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with display_for(Console()) as display:
        display.plan(2, WORK)
        for event in EVENTS:
            display.show(event)
    assert "build m portable" in capsys.readouterr().out


def test_verbose_terminals_get_lines() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(display_for(console), LiveDisplay)
    assert isinstance(display_for(console, verbose=True), LineDisplay)


def test_dumb_terminals_get_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(display_for(console), LineDisplay)
