"""Displays of a running campaign, from its events: lines, a live view on a terminal, or nothing."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from math import ceil, inf
from statistics import fmean
from threading import Event as ThreadEvent
from threading import RLock, Thread
from typing import Literal, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from freezer.codec import frozen
from pipeline.records import STYLES, Event, LiveFigures, verdict_text

Work = Mapping[str, Collection[str]]
"""The recipes to build, by `model device_class`; none for an item whose builds are finished."""


@frozen
class Running:
    """An item that is built or judged.

    Attributes:
        recipes: recipes that are being built.
        since: when it started, in monotonic seconds.
    """

    kind: Literal["build", "judge"]
    recipes: tuple[str, ...]
    since: float


class CampaignProgress:
    """Counts of a campaign.

    Attributes:
        total: number of outcomes to reach.
        num_done: number of outcomes reached.
        num_validated: number of candidates whose judge has ended.
        running: items that are built or judged, by `model device_class`, the oldest first.
    """

    def __init__(self) -> None:
        self.plan(0, {})

    def plan(self, num_items: int, work: Work) -> None:
        """Begin with the number of outcomes to reach, and the work that they need."""
        self.total = num_items
        self.num_done = 0
        self.num_validated = 0
        self.running: dict[str, Running] = {}
        self._to_build = Counter({what: len(recipes) for what, recipes in work.items()})
        self._to_judge = set(work)
        self._num_work = len(self._to_judge)
        self._seconds: dict[str, list[float]] = {"built": [], "judged": []}
        self._started = time.monotonic()
        self._ends: float | None = None

    @property
    def num_waiting(self) -> int:
        """Number of items with work left that are neither built nor judged now."""
        return len(self._to_judge - self.running.keys())

    @property
    def so_far(self) -> str:
        """How far builds and judges are, the number of validated candidates, and the time left once
        a build and a judge have ended.
        """
        if not self._num_work:
            return f"{self.num_done} of {self.total} done"
        num_built = len(self._seconds["built"])
        num_judged = self._num_work - len(self._to_judge)
        text = (
            f"built {num_built} of {num_built + self._to_build.total()},"
            f" validated {self.num_validated}, judged {num_judged} of {self._num_work}"
        )
        if self._ends is None or not self._to_judge:
            return text
        minutes = ceil(max(1.0, self._ends - time.monotonic()) / 60)
        return f"{text}, about {minutes} min left"

    @property
    def now(self) -> str:
        """What runs, and for how long."""
        now = time.monotonic()
        texts = [
            f"{item.kind} {what} {now - item.since:.0f} s" for what, item in self.running.items()
        ]
        return "now: " + ", ".join(texts)

    def add(self, event: Event) -> None:
        """Take in an event."""
        match event.kind:
            case "build" | "judge":
                new = Running(kind=event.kind, recipes=(), since=time.monotonic())
                running = self.running.get(event.what, new)
                recipes = (*running.recipes, *event.recipes)
                self.running[event.what] = replace(running, kind=event.kind, recipes=recipes)
                if event.kind == "judge":  # recipes that are left now were skipped
                    self._to_build.pop(event.what, None)
            case "built":
                self._to_build[event.what] -= len(event.recipes)
                self._end(event)
            case "judged":
                self._to_judge.discard(event.what)
                self.num_validated += len(event.recipes)
                self._end(event)
            case "retried":
                self._stop(event)
            case "outcome":
                self.running.pop(event.what, None)
                self.num_done += 1
                self._to_build.pop(event.what, None)
                self._to_judge.discard(event.what)

    def _end(self, event: Event) -> None:
        """Count a step that ended, and estimate the end: what is left takes as long as what ended,
        with as many steps at a time. The mean with the last estimate keeps it steady.
        """
        self._stop(event)
        self._seconds[event.kind].append(event.seconds)
        built, judged = self._seconds.values()
        num_builds = self._to_build.total()
        if not judged or (num_builds and not built):
            return
        left_s = fmean(judged) * len(self._to_judge) + fmean(built or [0.0]) * num_builds
        now = time.monotonic()
        ends = now + left_s * (now - self._started) / max(1.0, sum(built) + sum(judged))
        self._ends = ends if self._ends is None else (self._ends + ends) / 2

    def _stop(self, event: Event) -> None:
        """Remove recipes that ended, and the item if nothing of it runs any more."""
        running = self.running.get(event.what)
        if running is None:
            return
        left = tuple(recipe for recipe in running.recipes if recipe not in event.recipes)
        if left:
            self.running[event.what] = replace(running, recipes=left)
        else:
            del self.running[event.what]


class Display:
    """Shows events; this one shows nothing. A context manager around a campaign."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def plan(self, num_items: int, work: Work) -> None:
        """Set the number of outcomes to reach, and the work that they need."""

    def observe(self, look: Callable[[], LiveFigures]) -> None:
        """Take a function that returns the current figures; any thread may call it."""

    def show(self, event: Event) -> None:
        """Show an event; called from one thread only."""

    def note(self, text: str) -> None:
        """Show a note about the campaign."""
        self.show(Event(kind="note", text=text))


def display_for(console: Console, *, verbose: bool = False) -> Display:
    """Return a live display on a terminal, else one that prints lines.

    Args:
        console: console to print on.
        verbose: whether to print a line for each recipe and step, also on a terminal.
    """
    if console.is_terminal and not console.is_dumb_terminal and not verbose:
        return LiveDisplay(console)
    return LineDisplay(console, verbose=verbose)


COUNT_S = 5.0
"""Least interval between lines with counts of builds."""

SILENCE_S = 9.0
"""Time without a line after which what runs is printed."""


class LineDisplay(Display):
    """Prints lines with the time since the start, for logs and pipes.

    Args:
        console: console to print on.
        verbose: whether to print a line for each recipe and step, instead of one for the builds and
            one for the judge of an item.
    """

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        self._console = console
        self._verbose = verbose
        self._started = time.monotonic()
        self._progress = CampaignProgress()
        self._begun: set[str] = set()
        self._counted = -inf
        self._printed = time.monotonic()
        self._lock, self._ended = RLock(), ThreadEvent()

    def __enter__(self) -> Self:
        Thread(
            target=self._break_silences,
            name="display",
            daemon=True,
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        sys.stdout.flush()

    def _break_silences(self) -> None:
        """Print what runs when nothing was printed for a while; the driver may wait."""
        while not self._ended.wait(1.0):
            with self._lock:
                if self._progress.running and time.monotonic() - self._printed > SILENCE_S:
                    self._print(f"{self._progress.now} ({self._progress.so_far})")

    def plan(self, num_items: int, work: Work) -> None:
        """Print the number of outcomes to reach and of builds to do."""
        self._progress.plan(num_items, work)
        self._begun.clear()
        num_builds = sum(map(len, work.values()))
        self._print(f"{num_items} outcomes to reach, {num_builds} builds to do")

    def show(self, event: Event) -> None:
        """Print the event."""
        with self._lock:
            self._show(event)

    def _show(self, event: Event) -> None:
        self._progress.add(event)
        line = f"{event.kind} {event.what}"
        if event.kind == "note":
            self._print(event.text)
        elif event.outcome is not None:
            self._print(f"{line} {verdict_text(event.outcome)} ({self._progress.so_far})")
        elif self._verbose and event.kind != "retried":  # which has a note
            words = (event.kind, event.what, ", ".join(event.recipes), event.text)
            self._print(" ".join(filter(None, words)))
        elif event.kind == "built" and time.monotonic() - self._counted >= COUNT_S:
            self._counted = time.monotonic()
            self._print(self._progress.so_far)
        elif event.kind in ("build", "judge") and line not in self._begun:
            self._begun.add(line)
            self._print(f"{line} ({self._progress.so_far})")

    def _print(self, text: str) -> None:
        self._printed = time.monotonic()
        self._console.print(
            f"{time.monotonic() - self._started:7.1f}s {text}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


class LiveDisplay(Display):
    """Shows the counts of builds and judges, and a row for each running item; prints outcomes and
    notes above.

    Args:
        console: console to print on.
    """

    def __init__(self, console: Console) -> None:
        self._progress = CampaignProgress()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._steps = self._bars.add_task("", total=None)
        self._rows: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def plan(self, num_items: int, work: Work) -> None:
        """Set the number of outcomes to reach, and the work that they need."""
        self._progress.plan(num_items, work)
        self._update_rows()

    def show(self, event: Event) -> None:
        """Update the rows; an outcome or a note is printed above them."""
        self._progress.add(event)
        outcome = event.outcome
        if event.kind == "note":
            self._bars.console.print(Text(event.text, style="dim"), soft_wrap=True)
        elif outcome is not None:
            style = STYLES.get(outcome.verdict, "")
            line = Text.assemble((f"{event.what}  ", "bold"), (verdict_text(outcome), style))
            self._bars.console.print(line, soft_wrap=True)
        self._update_rows()

    def _update_rows(self) -> None:
        self._bars.update(self._steps, description=self._progress.so_far)
        running = self._progress.running
        for what in self._rows.keys() - running.keys():
            self._bars.remove_task(self._rows.pop(what))
        for what, item in running.items():
            if what not in self._rows:
                self._rows[what] = self._bars.add_task(what, total=None)
            self._bars.update(self._rows[what], description=f"{item.kind} {what}")
