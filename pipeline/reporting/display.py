"""Displays of a running campaign: lines, or a live view on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeline.records.events import STYLES, Event, verdict_text


class Display(Protocol):
    """Shows events. A context manager around a campaign."""

    def __enter__(self) -> Display: ...
    def __exit__(self, *_: object) -> None: ...
    def plan(self, num_items: int, num_builds: int) -> None:
        """Set the number of outcomes to reach and of builds to do."""

    def show(self, event: Event) -> None:
        """Show an event; called from one thread only."""


def display_for(console: Console) -> Display:
    """Return a live display on a terminal, else one that prints lines."""
    return LiveDisplay(console) if console.is_terminal else LineDisplay(console)


class LineDisplay:
    """Prints one line for each event, with the time since the start, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()

    def __enter__(self) -> LineDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()

    def plan(self, num_items: int, num_builds: int) -> None:
        """Print the number of outcomes to reach and of builds to do."""
        self.show(Event(kind="note", text=f"{num_items} outcomes to reach, {num_builds} builds to do"))

    def show(self, event: Event) -> None:
        """Print the event."""
        text = verdict_text(event.outcome) if event.outcome else event.text
        words = " ".join(word for word in ("" if event.kind == "note" else event.kind, event.what, text) if word)
        self._console.print(f"{time.monotonic() - self._started:7.1f}s {words}", highlight=False, markup=False, soft_wrap=True)


class LiveDisplay:
    """Shows progress, verdicts, running tasks and time left, redrawn in place; prints outcomes above."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._running: dict[str, tuple[str, float]] = {}
        self._counts: dict[str, int] = {}
        self._total = self._builds = self._built = 0
        self._note = "starting Ray"
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveDisplay:
        self._live.__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        self._live.__exit__(None, None, None)

    def plan(self, num_items: int, num_builds: int) -> None:
        """Set the number of outcomes to reach and of builds to do."""
        self._total, self._builds, self._note = num_items, num_builds, ""

    def show(self, event: Event) -> None:
        """Update the display; an outcome is printed above the live part."""
        if event.kind == "note":
            self._note = event.text
        elif event.kind in ("build", "judge"):
            self._running[event.what] = (event.kind, self._clock())
        else:
            self._running.pop(event.what, None)
            self._built += event.kind == "built"
        if event.outcome is not None:
            verdict = event.outcome.verdict
            self._counts[verdict] = self._counts.get(verdict, 0) + 1
            line = Text.assemble((f"{event.what:<32} ", "bold"), (verdict_text(event.outcome), STYLES.get(verdict, "")))
            self._live.console.print(line)

    def _draw(self) -> Group:
        done = sum(self._counts.values())
        left = self._time_left(done)
        head = Text.assemble(
            (f"{done} of {self._total} done", "bold"),
            f", {self._built} of {self._builds} built, {self._clock() - self._started:.0f} s",
            f", about {left:.0f} s left" if left else "",
            *[(f"  {count} {verdict}", STYLES.get(verdict, "")) for verdict, count in self._counts.items()],
        )
        table = Table.grid(padding=(0, 2))
        rows: dict[str, list[tuple[str, str, float]]] = {}
        for what, (kind, since) in self._running.items():
            item = what.rpartition(" ")[0] if kind == "build" else what
            rows.setdefault(f"{kind} {item}", []).append((kind, what, since))
        for row in rows.values():  # the builds of an item in one
            kind, what, since = row[0]
            shown = what if len(row) == 1 else f"{what.rpartition(' ')[0]} {len(row)} recipes"
            table.add_row(Text(kind, style="dim"), shown, Text(f"{self._clock() - since:.0f} s", style="dim"))
        return Group(head, Text(self._note, style="dim"), table) if self._note else Group(head, table)

    def _time_left(self, done: int) -> float | None:
        """Estimate the seconds left from the steps so far; a build and a judge count as one each."""
        steps = self._built + done
        if steps < 2 or not self._total:
            return None
        return (self._clock() - self._started) / steps * (self._builds + self._total - steps)
