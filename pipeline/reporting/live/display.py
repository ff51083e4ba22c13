"""Displays of a running campaign: lines, a live view on a terminal, or nothing."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeline.records import STYLES, Event, LiveFigures, verdict_text
from pipeline.reporting.live.campaign_progress import CampaignProgress, ItemWork

MARGIN_LINES = 6
"""Lines of a terminal that the live view leaves for counts and outcomes."""

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


def display_for(console: Console, *, quiet: bool = False, verbose: bool = False) -> Display:
    """Return a live display on a terminal, else one that prints lines.

    Args:
        console: console to print on.
        quiet: whether to print nothing.
        verbose: whether to print a line for each recipe and step.
    """
    if quiet:
        return Display()
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console, verbose=verbose)
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
    """Shows counts, time left and running items, redrawn in place; prints outcomes above.

    Args:
        console: console to print on.
        verbose: whether to print a line for each recipe and step.
        clock: the clock of the times.
    """

    def __init__(
        self, console: Console, *, verbose: bool = False, clock: Clock = time.monotonic
    ) -> None:
        self._verbose = verbose
        self._clock = clock
        self._started = clock()
        self._progress = CampaignProgress(clock)
        self._note = ""
        self._live = Live(
            get_renderable=self._draw,
            console=console,
            refresh_per_second=4,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        self._live.__exit__(None, None, None)

    def plan(self, num_items: int, work: Sequence[ItemWork]) -> None:
        """Set the number of outcomes to reach, and the work that they need."""
        self._progress.plan(num_items, work)
        self._note = ""

    def show(self, event: Event) -> None:
        """Update the display; an outcome is printed above the live part."""
        self._progress.add(event)
        outcome = event.outcome
        if event.kind == "note":
            self._note = event.text
        elif outcome is not None:
            style = STYLES.get(outcome.verdict, "")
            line = Text.assemble((f"{event.what}  ", "bold"), (verdict_text(outcome), style))
            self._live.console.print(line, soft_wrap=True)
        elif self._verbose:
            for text in step_lines(event):
                self._live.console.print(Text(text, style="dim"), soft_wrap=True)

    def _draw(self) -> Group:
        note = [Text(self._note, style="dim")] if self._note else []
        if not self._progress.total:
            return Group(*note)
        return Group(self._verdicts(), self._states(), *note, self._rows())

    def _verdicts(self) -> Text:
        progress = self._progress
        line = Text(f"{progress.num_done} of {progress.total} done", style="bold")
        for verdict, count in list(progress.verdicts.items()):
            style = STYLES.get(verdict, "")
            line.append(f"  {count} {verdict}", style=style)
        return line

    def _states(self) -> Text:
        progress = self._progress
        running = list(progress.running.values())  # another thread changes it
        kinds = Counter(item.kind for item in running)
        line = f"{kinds['build']} building  {kinds['judge']} judging"
        line += f"  {progress.num_waiting} waiting"
        line += f"  {duration(self._clock() - self._started)}"
        left = progress.time_left()
        if left:
            line += f", about {duration(left)} left"
        return Text(line)

    def _rows(self) -> Table:
        """Return a row for each running item that the terminal has room for, the oldest first."""
        table = Table.grid(padding=(0, 2))
        running = list(self._progress.running.items())
        num_shown = max(1, self._live.console.height - MARGIN_LINES)
        for what, item in running[:num_shown]:
            kind = Text(item.kind, style="dim")
            recipes = counted_recipes(item.recipes) if item.recipes else ""
            seconds = self._clock() - item.since
            since = Text(duration(seconds), style="dim")
            table.add_row(kind, what, recipes, since)
        num_more = len(running) - num_shown
        if num_more > 0:
            table.add_row("", f"and {num_more} more")
        return table


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
