"""Displays of a running campaign: lines, a live view on a terminal, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from pipeline.records import STYLES, Event, LiveFigures, verdict_text
from pipeline.reporting.live.campaign_progress import CampaignProgress, ItemWork

Clock = Callable[[], float]
"""Returns seconds from any start."""


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
        clock: the clock of the times.
    """

    def __init__(
        self, console: Console, *, verbose: bool = False, clock: Clock = time.monotonic
    ) -> None:
        self._console = console
        self._verbose = verbose
        self._clock = clock
        self._started = clock()
        self._progress = CampaignProgress(clock)
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
        planned = self._progress.recipes_of(event.what)
        self._progress.add(event)
        if event.kind == "note":
            self._print(event.text)
        elif event.outcome is not None:
            self._print(f"outcome {event.what} {verdict_text(event.outcome)}{self._so_far()}")
        elif self._verbose:
            for line in step_lines(event):
                self._print(line)
        elif event.kind == "judge":
            self._print(f"judge {event.what}")
        elif event.kind == "build" and event.what not in self._begun:
            self._begun.add(event.what)
            self._print(f"build {event.what} {counted_recipes(planned or event.recipes)}")

    def _so_far(self) -> str:
        """Return how far the campaign is, while there is work left."""
        progress = self._progress
        left = progress.time_left()
        if not left or progress.num_done >= progress.total:
            return ""
        return f" ({progress.num_done} of {progress.total} done, about {duration(left)} left)"

    def _print(self, text: str) -> None:
        line = f"{self._clock() - self._started:7.1f}s {text}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class LiveDisplay(Display):
    """Shows a bar of the outcomes and a row for each running item; prints outcomes and notes above.

    Args:
        console: console to print on.
    """

    def __init__(self, console: Console) -> None:
        self._progress = CampaignProgress(time.monotonic)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
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


def counted_recipes(recipes: Sequence[str]) -> str:
    """Return the name of a single recipe, or the number of several."""
    return recipes[0] if len(recipes) == 1 else f"{len(recipes)} recipes"


def duration(seconds: float) -> str:
    """Return a duration with about two digits: `41 s`, `7 min`, `2.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
