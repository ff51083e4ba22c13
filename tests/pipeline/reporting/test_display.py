"""What people see while a campaign runs: lines, the live view, and the estimate of the time
left.
"""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipeline.records import Event, verdict_text
from pipeline.reporting import Display, ItemWork, LineDisplay, display_for
from pipeline.reporting.live.display import LiveDisplay
from tests.support.past_outcomes import CRASH, EVENTS, FAILED, WORK


def lines_of(*, verbose: bool) -> list[str]:
    """The lines of EVENTS without their times."""
    now = [0.0]
    console = Console(file=io.StringIO(), width=80)
    with LineDisplay(console, verbose=verbose, clock=lambda: now[0]) as display:
        display.plan(3, [*WORK, ItemWork(what="n portable")])
        for event in EVENTS:
            now[0] += 1.0
            display.show(event)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.split(maxsplit=1)[1] for line in text.splitlines()]


def test_lines_are_one_for_each_item_and_step() -> None:
    lines = lines_of(verbose=False)
    assert lines[:4] == [
        "3 outcomes to reach, 3 builds to do",
        "build m cpu-x86-64-v4 2 recipes",
        "build m portable portable",
        "judge m cpu-x86-64-v4",
    ]
    progress = "(1 of 3 done, about 5 s left)"
    assert lines[4] == f"outcome m cpu-x86-64-v4 {verdict_text(FAILED)} {progress}"
    assert CRASH.message not in lines[4], "the report prints it, once"
    assert len(lines) == 5


def test_verbose_lines_name_each_recipe() -> None:
    lines = lines_of(verbose=True)
    assert "build m cpu-x86-64-v4 inductor-frozen" in lines
    assert "built m cpu-x86-64-v4 torchscript-frozen in 4.0 s" in lines
    assert "judged m cpu-x86-64-v4 in 9.0 s" in lines
    assert len(lines) == 1 + 3 + 2 + 2 + 1


def test_live_view_shows_states_and_running_items() -> None:
    now = [0.0]
    console = Console(file=io.StringIO(), width=80, height=8)
    display = LiveDisplay(console, clock=lambda: now[0])
    display.plan(
        5,
        [
            *WORK,
            *(ItemWork(what=f"n{index} portable", recipes=("portable",)) for index in range(3)),
        ],
    )

    def drawn() -> str:
        with console.capture() as capture:
            console.print(display._draw())
        return capture.get()

    for event in EVENTS[:4]:
        display.show(event)
    now[0] = 10.0
    assert "0 of 5 done\n2 building  0 judging  3 waiting  10 s" in drawn()
    assert "build  m cpu-x86-64-v4  inductor-frozen  10 s" in drawn()
    for index in range(3):
        display.show(Event(kind="build", what=f"n{index} portable", recipes=("portable",)))
    assert "and 3 more" in drawn(), "a terminal of 8 lines"
    for event in EVENTS[4:]:
        display.show(event)
    assert "1 of 5 done  1 failed\n4 building  0 judging  0 waiting  10 s" in drawn()
    assert "m cpu-x86-64-v4" not in drawn()


def test_quiet_prints_nothing_and_pipes_get_lines(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(display: Display) -> str:
        with display:
            display.plan(2, WORK)
            for event in EVENTS:
                display.show(event)
        return capsys.readouterr().out

    assert shown(display_for(Console(), quiet=True)) == ""
    assert "build m portable portable" in shown(display_for(Console()))


def test_dumb_terminals_get_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(display_for(console), LineDisplay)
