"""Displays of a running campaign, from its events: lines, a live view on a terminal, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from pipeline.records import STYLES, Event, LiveFigures, verdict_text


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemWork:
    """The work of one item, known at the start.

    Attributes:
        what: `model device_class`.
        recipes: recipes to build; empty if they are built.
    """

    what: str
    recipes: tuple[str, ...] = ()

    @property
    def device_class(self) -> str:
        """The class."""
        return self.what.rpartition(" ")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """An item that is built or judged.

    Attributes:
        recipes: recipes that are being built.
    """

    kind: Literal["build", "judge"]
    recipes: tuple[str, ...]


class CampaignProgress:
    """Counts of a campaign.

    Attributes:
        total: number of outcomes to reach.
        num_done: number of outcomes reached.
        running: items that are built or judged, by `model device_class`, the oldest first.
    """

    def __init__(self) -> None:
        self.plan(0, ())

    def plan(self, num_items: int, work: Sequence[ItemWork]) -> None:
        """Begin with the number of outcomes to reach, and the work that they need."""
        self.total = num_items
        self.num_done = 0
        self.running: dict[str, Running] = {}
        self._left = {item.what for item in work}
        self._num_work = len(self._left)
        self._started = time.monotonic()

    @property
    def num_waiting(self) -> int:
        """Number of items with work left that are neither built nor judged now."""
        return len(self._left - self.running.keys())

    @property
    def so_far(self) -> str:
        """How far the campaign is, and the time left if the other items end as fast as those that
        have.
        """
        done = f"{self.num_done} of {self.total} done"
        num_ended = self._num_work - len(self._left)
        if not num_ended or not self._left:
            return done
        left_s = (time.monotonic() - self._started) / num_ended * len(self._left)
        return f"{done}, about {timedelta(seconds=round(left_s))} left"

    def add(self, event: Event) -> None:
        """Take in an event."""
        match event.kind:
            case "build" | "judge":
                running = self.running.get(event.what)
                recipes = running.recipes if running else ()
                self.running[event.what] = Running(
                    kind=event.kind, recipes=(*recipes, *event.recipes)
                )
            case "built" | "retried":
                self._stop(event)
            case "judged":
                self._stop(event)
                self._left.discard(event.what)
            case "outcome":
                self.running.pop(event.what, None)
                self.num_done += 1
                self._left.discard(event.what)

    def _stop(self, event: Event) -> None:
        """Remove recipes that ended, and the item if nothing of it runs any more."""
        running = self.running.get(event.what)
        if running is None:
            return
        left = tuple(recipe for recipe in running.recipes if recipe not in event.recipes)
        if left:
            self.running[event.what] = replace(running, recipes=left)
            return
        del self.running[event.what]


class Display:
    """Shows events; this one shows nothing. A context manager around a campaign."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def plan(self, num_items: int, work: Sequence[ItemWork]) -> None:
        """Set the number of outcomes to reach, and the work that they need."""

    def observe(self, look: Callable[[], LiveFigures]) -> None:
        """Take a function that returns the current figures; any thread may call it."""

    def show(self, event: Event) -> None:
        """Show an event; called from one thread only."""


def display_for(console: Console, *, verbose: bool = False) -> Display:
    """Return a live display on a terminal, else one that prints lines.

    Args:
        console: console to print on.
        verbose: whether to print a line for each recipe and step, also on a terminal.
    """
    if console.is_terminal and not console.is_dumb_terminal and not verbose:
        return LiveDisplay(console)
    return LineDisplay(console, verbose=verbose)


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

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()

    def plan(self, num_items: int, work: Sequence[ItemWork]) -> None:
        """Print the number of outcomes to reach and of builds to do."""
        self._progress.plan(num_items, work)
        self._begun.clear()
        num_builds = sum(len(item.recipes) for item in work)
        self._print(f"{num_items} outcomes to reach, {num_builds} builds to do")

    def show(self, event: Event) -> None:
        """Print the event."""
        self._progress.add(event)
        line = f"{event.kind} {event.what}"
        if event.kind == "note":
            self._print(event.text)
        elif event.outcome is not None:
            self._print(f"{line} {verdict_text(event.outcome)} ({self._progress.so_far})")
        elif self._verbose:
            for step in step_lines(event):
                self._print(step)
        elif event.kind in ("build", "judge") and line not in self._begun:
            self._begun.add(line)
            self._print(line)

    def _print(self, text: str) -> None:
        line = f"{time.monotonic() - self._started:7.1f}s {text}"
        self._console.print(
            line,
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


class LiveDisplay(Display):
    """Shows a bar of the outcomes and a row for each running item; prints outcomes and notes above.

    Args:
        console: console to print on.
    """

    def __init__(self, console: Console) -> None:
        self._progress = CampaignProgress()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=3600,
            transient=True,
        )
        self._outcomes = self._bars.add_task("outcomes", total=None)
        self._rows: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def plan(self, num_items: int, work: Sequence[ItemWork]) -> None:
        """Set the number of outcomes to reach, and the work that they need."""
        self._progress.plan(num_items, work)
        self._bars.update(self._outcomes, total=num_items)

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
        self._bars.update(self._outcomes, completed=self._progress.num_done)
        self._update_rows()

    def _update_rows(self) -> None:
        running = self._progress.running
        for what in self._rows.keys() - running.keys():
            self._bars.remove_task(self._rows.pop(what))
        for what, item in running.items():
            if what not in self._rows:
                self._rows[what] = self._bars.add_task(what, total=None)
            self._bars.update(self._rows[what], description=f"{item.kind} {what}")


def step_lines(event: Event) -> list[str]:
    """Return a line for each recipe of a step, or one for a judge: `built resnet cpu-x86-64-v4
    inductor-frozen in 12.1 s`; none for a retry, which has a note.
    """
    if event.kind == "retried":
        return []
    lines = []
    for recipe in event.recipes or ("",):
        words = (event.kind, event.what, recipe, event.text)
        lines.append(" ".join(filter(None, words)))
    return lines
