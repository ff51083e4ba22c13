"""Progress of a running campaign, from its events: the items by state, and an estimate of the time
left.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean
from typing import Literal

from pipeline.records import Event


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
        since: time of the clock when it began.
    """

    kind: Literal["build", "judge"]
    recipes: tuple[str, ...]
    since: float


class CampaignProgress:
    """Counts and time left of a campaign.

    Attributes:
        total: number of outcomes to reach.
        verdicts: number of outcomes by verdict.
        running: items that are built or judged, by `model device_class`, the oldest first.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.plan(0, ())

    def plan(self, num_items: int, work: Sequence[ItemWork]) -> None:
        """Begin with the number of outcomes to reach, and the work that they need."""
        self.total = num_items
        self.verdicts = Counter[str]()
        self.running: dict[str, Running] = {}
        self._left = {item.what: item for item in work}
        self._seconds: dict[str, float] = defaultdict(float)  # of each item that has begun
        self._finished: dict[str, list[float]] = defaultdict(list)  # seconds of items, by class

    @property
    def num_done(self) -> int:
        """Number of outcomes reached."""
        return self.verdicts.total()

    @property
    def num_waiting(self) -> int:
        """Number of items with work left that are neither built nor judged now."""
        return len(self._left.keys() - self.running.keys())

    def recipes_of(self, what: str) -> tuple[str, ...]:
        """Return the recipes to build of an item."""
        return self._left[what].recipes if what in self._left else ()

    def add(self, event: Event) -> None:
        """Take in an event."""
        match event.kind:
            case "build" | "judge":
                running = self.running.get(event.what)
                self.running[event.what] = Running(
                    kind=event.kind,
                    recipes=(*running.recipes, *event.recipes) if running else event.recipes,
                    since=running.since if running else self._clock(),
                )
            case "built" | "retried":
                self._stop(event)
            case "judged":
                self._stop(event)
                self._finish(event.what)
            case "outcome" if event.outcome is not None:
                self.running.pop(event.what, None)
                self.verdicts[event.outcome.verdict] += 1
                self._finish(event.what)

    def time_left(self) -> float | None:
        """Return the seconds left, or None before an item has finished.

        Every item left takes as long as the mean of its class, or of all classes, and as many run
        at a time as now.
        """
        everything = list(chain.from_iterable(self._finished.values()))
        if not everything:
            return None
        now = self._clock()
        running = dict(self.running)  # another thread changes it
        left = 0.0
        for what, work in list(self._left.items()):
            of_class = self._finished.get(work.device_class)
            expected = fmean(of_class or everything)
            spent = self._seconds.get(what, 0.0)
            if what in running:
                spent += now - running[what].since
            left += max(0.0, expected - spent)
        return left / max(1, len(running))

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
        self._seconds[event.what] += self._clock() - running.since

    def _finish(self, what: str) -> None:
        work = self._left.pop(what, None)
        seconds = self._seconds.pop(what, 0.0)
        if work is not None and seconds:
            self._finished[work.device_class].append(seconds)
