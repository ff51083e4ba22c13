"""Displays of a running campaign: lines, a live view on a terminal, or nothing."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeline.records import STYLES, Event, LiveFigures, verdict_text
from pipeline.reporting.remaining_time import CampaignProgress, ItemWork, Running

MARGIN_LINES = 6
"""Lines of a terminal that the live view leaves for counts and outcomes."""


class Display(Protocol):
    """Shows events. A context manager around a campaign."""

    def __enter__(self) -> Display: ...
    def __exit__(self, *_: object) -> None: ...
    def plan(self, num_items: int, work: Sequence[ItemWork]) -> None:
        """Set the number of outcomes to reach, and the work that they need."""

    def observe(self, look: Callable[[], LiveFigures]) -> None:
        """Take a function that returns the current figures; any thread may call it."""

    def show(self, event: Event) -> None:
        """Show an event; called from one thread only."""


def display_for(console: Console, *, quiet: bool = False, verbose: bool = False) -> Display:
    """Return a live display on a terminal, else one that prints lines.

    Args:
        console: to print on.
        quiet: print nothing.
        verbose: print a line for each recipe and step.
    """
    if quiet:
        return QuietDisplay()
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveDisplay(console, verbose=verbose) if live else LineDisplay(console, verbose=verbose)


class QuietDisplay:
    """Shows nothing."""

    def __enter__(self) -> QuietDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def plan(self, num_items: int, work: Sequence[ItemWork]) -> None:
        """Ignore the plan."""

    def observe(self, look: Callable[[], LiveFigures]) -> None:
        """Ignore the figures."""

    def show(self, event: Event) -> None:
        """Ignore an event."""


class LineDisplay:
    """Prints lines with the time since the start, for logs and pipes.

    Args:
        console: to print on.
        verbose: whether to print a line for each recipe and step, instead of one for the builds and
            one for the judge of an item.
        clock: seconds from any start.
    """

    def __init__(
        self,
        console: Console,
        *,
        verbose: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._verbose, self._clock, self._started = console, verbose, clock, clock()
        self._progress = CampaignProgress(clock)
        self._begun: set[str] = set()

    def __enter__(self) -> LineDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()

    def plan(self, num_items: int, work: Sequence[ItemWork]) -> None:
        """Print the number of outcomes to reach and of builds to do."""
        self._progress.plan(num_items, work)
        self._begun.clear()
        self._print(
            f"{num_items} outcomes to reach, {sum(len(one.recipes) for one in work)} builds to do"
        )

    def observe(self, look: Callable[[], LiveFigures]) -> None:
        """Ignore the figures."""

    def show(self, event: Event) -> None:
        """Print the event."""
        self._progress.add(event)
        if event.kind == "note":
            self._print(event.text)
        elif event.outcome is not None:
            self._print(f"outcome {event.what} {verdict_text(event.outcome)}{self._so_far()}")
        elif self._verbose:
            for line in step_lines(event):
                self._print(line)
        elif event.kind == "judge" or (event.kind == "build" and event.what not in self._begun):
            self._begun.add(event.what)
            self._print(
                f"{event.kind} {event.what}"
                f" {counted_recipes(self._progress.recipes_of(event.what), event)}".rstrip()
            )

    def _so_far(self) -> str:
        """Return how far the campaign is, while there is work left."""
        left = self._progress.time_left()
        done = f"{self._progress.num_done} of {self._progress.total} done"
        return (
            f" ({done}, about {duration(left)} left)"
            if left and self._progress.num_done < self._progress.total
            else ""
        )

    def _print(self, text: str) -> None:
        seconds = self._clock() - self._started
        self._console.print(
            f"{seconds:7.1f}s {text}", highlight=False, markup=False, soft_wrap=True
        )


class LiveDisplay:
    """Shows counts, time left and running items, redrawn in place; prints outcomes above.

    Args:
        console: to print on.
        verbose: whether to print a line for each recipe and step, and all notes.
        clock: seconds from any start.
    """

    def __init__(
        self,
        console: Console,
        *,
        verbose: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._verbose, self._started = clock, verbose, clock()
        self._progress = CampaignProgress(clock)
        self._note = ""
        self._live = Live(
            get_renderable=self._draw, console=console, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> LiveDisplay:
        self._live.__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        self._live.__exit__(None, None, None)

    def plan(self, num_items: int, work: Sequence[ItemWork]) -> None:
        """Set the number of outcomes to reach, and the work that they need."""
        self._progress.plan(num_items, work)
        self._note = ""

    def observe(self, look: Callable[[], LiveFigures]) -> None:
        """Ignore the figures."""

    def show(self, event: Event) -> None:
        """Update the display; an outcome is printed above the live part."""
        self._progress.add(event)
        if event.kind == "note":
            self._note = event.text
        if event.outcome is not None:
            style = STYLES.get(event.outcome.verdict, "")
            self._live.console.print(
                Text.assemble((f"{event.what}  ", "bold"), (verdict_text(event.outcome), style)),
                soft_wrap=True,
            )
        elif self._verbose:
            for line in [event.text] if event.kind == "note" else step_lines(event):
                self._live.console.print(
                    line, style="dim", highlight=False, markup=False, soft_wrap=True
                )

    def _draw(self) -> Group:
        note = [Text(self._note, style="dim")] if self._note else []
        if not self._progress.total:
            return Group(*note)
        return Group(self._verdicts(), self._states(), *note, self._rows())

    def _verdicts(self) -> Text:
        progress = self._progress
        counts = [
            (f"  {count} {verdict}", STYLES.get(verdict, ""))
            for verdict, count in list(progress.verdicts.items())
        ]
        return Text.assemble((f"{progress.num_done} of {progress.total} done", "bold"), *counts)

    def _states(self) -> Text:
        progress, left = self._progress, self._progress.time_left()
        kinds = Counter(
            running.kind for running in list(progress.running.values())
        )  # this is another thread
        states = (
            f"{kinds['build']} building  {kinds['judge']} judging  {progress.num_waiting} waiting"
        )
        return Text(
            f"{states}  {duration(self._clock() - self._started)}"
            + (f", about {duration(left)} left" if left else "")
        )

    def _rows(self) -> Table:
        """Return a row for each running item that the terminal has room for, the oldest first."""
        table = Table.grid(padding=(0, 2))
        running = list(self._progress.running.items())
        num_shown = max(1, self._live.console.height - MARGIN_LINES)
        for what, item in running[:num_shown]:
            table.add_row(
                Text(item.kind, style="dim"),
                what,
                _recipes(item),
                Text(duration(self._clock() - item.since), style="dim"),
            )
        if len(running) > num_shown:
            table.add_row("", f"and {len(running) - num_shown} more")
        return table


def step_lines(event: Event) -> list[str]:
    """Return a line for each recipe of a step, or one for a judge: `built resnet cpu-x86-64-v4
    inductor-frozen in 12.1 s`.

    What is retried has no line: a note says why.
    """
    if event.kind == "retried":
        return []
    return [
        " ".join(word for word in (event.kind, event.what, recipe, event.text) if word)
        for recipe in event.recipes or ("",)
    ]


def counted_recipes(planned: Sequence[str], event: Event) -> str:
    """Return the recipes of an item whose first build starts: the name of one, or how many; nothing
    for a judge.
    """
    recipes = planned or event.recipes
    if event.kind == "judge":
        return ""
    return recipes[0] if len(recipes) == 1 else f"{len(recipes)} recipes"


def duration(seconds: float) -> str:
    """Return a duration with about two digits: `41 s`, `7 min`, `2.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _recipes(item: Running) -> str:
    return (
        item.recipes[0]
        if len(item.recipes) == 1
        else f"{len(item.recipes)} recipes"
        if item.recipes
        else ""
    )
