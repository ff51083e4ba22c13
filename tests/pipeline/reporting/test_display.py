"""What people see while a campaign runs: lines, and the live view."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipeline.records import Event, verdict_text
from pipeline.reporting import LineDisplay, display_for
from pipeline.reporting.display import LiveDisplay
from tests.support.past_outcomes import CRASH, EVENTS, FAILED, WORK
from tests.support.raylets import wait_until


def test_lines_count_builds_and_judges() -> None:
    console = Console(file=io.StringIO(), width=80)
    with LineDisplay(console, verbose=False) as display:
        display.plan(3, {**WORK, "n portable": ()})
        for event in EVENTS:
            display.show(event)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [line.split(maxsplit=1)[1] for line in text.splitlines()]
    assert lines[0] == "3 outcomes to reach, 3 builds to do"
    assert lines[3] == "built 1 of 3, validated 0, judged 0 of 3"
    assert lines[5].startswith(f"outcome m cpu-x86-64-v4 {verdict_text(FAILED)} (built 2 of 3")
    assert CRASH.message not in lines[5], "the report prints it, once"
    assert len(lines) == 6


@pytest.mark.parametrize(
    ("terminal", "verbose", "kind"),
    [("xterm", False, LiveDisplay), ("xterm", True, LineDisplay), ("dumb", False, LineDisplay)],
)
def test_dumb_and_verbose_terminals_get_lines(
    terminal: str, verbose: bool, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", terminal)
    console = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(display_for(console, verbose=verbose), kind)


def test_silence_is_broken_by_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.reporting.display.SILENCE_S", 0.5)
    printed = io.StringIO()
    with LineDisplay(Console(file=printed, width=200)) as display:
        display.plan(1, {"m portable": ("portable",)})
        display.show(Event(kind="build", what="m portable", recipes=("portable",)))
        wait_until(lambda: "now: build m portable" in printed.getvalue(), "a line was printed", 10)
