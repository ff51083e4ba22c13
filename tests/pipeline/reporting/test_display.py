"""What people see while a campaign runs: lines, the live view, and the estimate of the time
left.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.records import Event, verdict_text
from pipeline.reporting import Display, ItemWork, LineDisplay, display_for
from pipeline.reporting.display import LiveDisplay
from pipeline.reporting.remaining_time import CampaignProgress
from tests.pipeline.reporting.test_campaign_report import CRASH, FAILED, PUBLISHED

RECIPES = ("torchscript-frozen", "inductor-frozen")
WORK = [
    ItemWork(what="m cpu-x86-64-v4", recipes=RECIPES),
    ItemWork(what="m portable", recipes=("portable",)),
]
EVENTS = [
    Event(kind="build", what="m cpu-x86-64-v4", recipes=RECIPES[:1]),
    Event(kind="build", what="m cpu-x86-64-v4", recipes=RECIPES[1:]),
    Event(kind="build", what="m portable", recipes=("portable",)),
    *(
        Event(kind="built", what="m cpu-x86-64-v4", recipes=(recipe,), text="in 4.0 s", seconds=4.0)
        for recipe in RECIPES
    ),
    Event(kind="judge", what="m cpu-x86-64-v4"),
    Event(kind="judged", what="m cpu-x86-64-v4", text="in 9.0 s", seconds=9.0),
    Event(kind="outcome", what="m cpu-x86-64-v4", outcome=FAILED),
]


RECORDED = Path(__file__).parent / "campaign_events.csv"
"""The events of a campaign over examples/zoo.yaml on 2 CPUs, continued after a kill; three judges
were repeated.

`before` rows have the seconds of the builds that the killed start had finished.
"""


def lines_of(*, verbose: bool) -> list[str]:
    """The lines of EVENTS without their times."""
    now = [0.0]
    console = Console(file=io.StringIO(), width=80)
    with LineDisplay(console, verbose=verbose, clock=lambda: now[0]) as display:
        display.plan(2, WORK)
        for event in EVENTS:
            now[0] += 1.0
            display.show(event)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.split(maxsplit=1)[1] for line in text.splitlines()]


def test_lines_are_one_for_each_item_and_step() -> None:
    lines = lines_of(verbose=False)
    assert lines[:4] == [
        "2 outcomes to reach, 3 builds to do",
        "build m cpu-x86-64-v4 2 recipes",
        "build m portable portable",
        "judge m cpu-x86-64-v4",
    ]
    assert lines[4].startswith(
        f"outcome m cpu-x86-64-v4 {verdict_text(FAILED)} (1 of 2 done, about "
    )
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
    assert "1 of 5 done  1 failed\n4 building  0 judging  0 waiting  10 s, about" in drawn()
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


def test_no_color_and_dumb_terminals_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    file = io.StringIO()
    with LiveDisplay(Console(file=file, force_terminal=True, width=80)) as display:
        display.plan(2, WORK)
        display.show(Event(kind="outcome", what="m portable", outcome=PUBLISHED))
    assert "published" in file.getvalue()
    assert "\x1b[3" not in file.getvalue(), "a color"
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(display_for(Console(file=file, force_terminal=True)), LineDisplay)


@dataclass(frozen=True)
class Row:
    """A recorded event; of `before` rows only what counts."""

    time_s: float
    is_before: bool
    event: Event

    @classmethod
    def of(cls, row: dict[str, str]) -> Row:
        event = Event(
            kind=row["kind"],  # type: ignore[arg-type]
            what=f"{row['model']} {row['device_class']}",
            recipes=(row["recipe"],) if row["recipe"] else (),
            seconds=float(row["seconds"]),
            outcome=PUBLISHED if row["kind"] == "outcome" else None,
        )
        return cls(float(row["time_s"]), row["kind"] == "before", event)


def work_of(before: Sequence[Row], rows: Sequence[Row], *, known: bool) -> list[ItemWork]:
    """The work of a recorded campaign; with `known`, an earlier campaign took as long for each
    build and judge.
    """
    recipes: dict[str, dict[str, float]] = {}
    judge_s: dict[str, float] = {}
    built_s = {row.event.what: row.event.seconds for row in before}
    for row in rows:
        own = recipes.setdefault(row.event.what, {})
        if row.event.kind == "built":
            own[row.event.recipes[0]] = row.event.seconds
        if row.event.kind == "judged":
            judge_s[row.event.what] = row.event.seconds
    return [
        ItemWork(
            what=what,
            recipes=tuple(own),
            built_s=built_s.get(what, 0.0),
            build_s=own if known else {},
            judge_s=judge_s[what] if known else None,
        )
        for what, own in recipes.items()
        if what in judge_s
    ]


@pytest.mark.parametrize(
    ("known", "since"), [(False, 0.55), (True, 0.2)], ids=["new models", "durations known"]
)
def test_time_left_is_right_within_30_percent(known: bool, since: float) -> None:
    with RECORDED.open() as file:
        recorded = [Row.of(row) for row in csv.DictReader(file)]
    before, rows = (
        [row for row in recorded if row.is_before == is_before] for is_before in (True, False)
    )
    now = rows[0].time_s
    progress = CampaignProgress(lambda: now)
    progress.plan(len(rows), work_of(before, rows, known=known))
    began, end = now, rows[-1].time_s
    ratios = {}
    for row in rows:
        now = row.time_s
        progress.add(row.event)
        left = progress.time_left()
        if left is not None and now >= began + since * (end - began) and end - now > 60:
            ratios[now] = left / (end - now)
    assert len(ratios) > 20
    assert {at: ratio for at, ratio in ratios.items() if not 0.7 < ratio < 1.3} == {}
