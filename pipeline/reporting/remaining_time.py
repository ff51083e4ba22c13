"""Progress of a running campaign, from its events: the items by state, and an estimate of the time
left.

A build of a recipe is expected to take as long as the last one of the same model and class, else as
the mean of that recipe so far. Judges grow with the builds of their item, and by how much is
learned from those that ended. Workers, waiting and overhead are contained in two measured rates:
seconds of builds, and of judges, for each second in which some ran.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pipeline.records import Event

JUDGE_BASE_S = 10.0
JUDGE_SHARE = 0.5
"""Before any judge has ended: it takes JUDGE_BASE_S and this share of its item's builds, as in
benchmarks/results/zoo-all-recipes-2026-11-21.md.
"""

RENEW_S = 5.0
"""Least age of an estimate that is renewed: it goes through all items."""

_Kind = Literal["build", "judge"]

ALL = ""
"""In place of a recipe or class: the mean of all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemWork:
    """The work of one item, known at the start.

    Attributes:
        what: `model device_class`.
        recipes: to build; empty if they are built.
        built_s: what its builds took that earlier starts finished.
        build_s: by recipe, how long the last build of the same model and class took; empty if
            unknown.
        judge_s: the same of its judge.
    """

    what: str
    recipes: tuple[str, ...] = ()
    built_s: float = 0.0
    build_s: Mapping[str, float] = field(default_factory=dict)
    judge_s: float | None = None

    @property
    def device_class(self) -> str:
        """The class."""
        return self.what.rpartition(" ")[2]


@dataclass(kw_only=True)
class _Item:
    """What happened to an item: seconds of its ended builds by recipe, and whether no more of its
    work is left.
    """

    work: ItemWork
    built: dict[str, float] = field(default_factory=dict)
    judging: bool = False
    done: bool = False


@dataclass(kw_only=True)
class _Rate:
    """Seconds of finished work, and of the clock while some was running."""

    work_s: float = 0.0
    busy_s: float = 0.0

    def left(self, work_s: float) -> float:
        """Return the seconds of the clock for some work."""
        return work_s * self.busy_s / self.work_s if self.work_s else work_s


@dataclass(kw_only=True)
class _Ratio:
    """The quotient of two sums."""

    above: float = 0.0
    below: float = 0.0

    def add(self, above: float, below: float) -> None:
        """Add to both."""
        self.above, self.below = self.above + above, self.below + below

    @property
    def value(self) -> float:
        """The quotient."""
        return self.above / self.below


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """An item that is built or judged: `build` or `judge`, the recipes under way, and when it
    began.
    """

    kind: _Kind
    recipes: tuple[str, ...]
    since: float


class CampaignProgress:
    """Counts and time left of a campaign.

    Attributes:
        total: outcomes to reach.
        verdicts: number of outcomes by verdict.
        running: items that are built or judged, by `model device_class`, the oldest first.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.plan(0, ())

    def plan(self, num_items: int, work: Sequence[ItemWork]) -> None:
        """Begin with the number of outcomes to reach, and the work that they need."""
        self.total, self.verdicts = num_items, Counter[str]()
        self.running: dict[str, Running] = {}
        self._items = {one.what: _Item(work=one) for one in work}
        self._rates = {"build": _Rate(), "judge": _Rate()}
        self._builds: dict[str, _Ratio] = defaultdict(_Ratio)  # seconds by number, of each recipe
        self._judges: dict[str, _Ratio] = defaultdict(_Ratio)  # seconds by `_prior`, of each class
        self._began: float | None = None
        self._now = self._clock()
        self._ended: float | None = None
        self._estimate: tuple[float, float] | None = None

    @property
    def num_done(self) -> int:
        """Number of outcomes reached."""
        return self.verdicts.total()

    @property
    def num_waiting(self) -> int:
        """Number of items with work left that are neither built nor judged now."""
        return sum(not item.done and what not in self.running for what, item in self._items.items())

    def recipes_of(self, what: str) -> tuple[str, ...]:
        """The recipes to build of an item."""
        return self._items[what].work.recipes if what in self._items else ()

    def add(self, event: Event) -> None:
        """Take in an event."""
        self._pass_time()
        item = self._items.get(event.what)
        match event.kind:
            case "build" | "judge":
                self._begin(event, item)
            case "built":
                self._end_builds(event, item)
            case "judged":
                self._end_judge(event, item)
            case "retried":
                kind: _Kind = "build" if event.recipes else "judge"
                self._rates[kind].work_s += self._stop(event)
                if item is not None:
                    item.judging = False
            case "outcome" if event.outcome is not None:
                self.running.pop(event.what, None)
                self.verdicts[event.outcome.verdict] += 1
                if item is not None:
                    item.done = True

    def _begin(self, event: Event, item: _Item | None) -> None:
        if self._began is None:
            self._began = self._now
        kind: _Kind = "judge" if event.kind == "judge" else "build"
        known = self.running.get(event.what, Running(kind=kind, recipes=(), since=self._now))
        self.running[event.what] = replace(
            known, kind=kind, recipes=(*known.recipes, *event.recipes)
        )
        if item is not None:
            item.judging = event.kind == "judge"

    def time_left(self) -> float | None:
        """Return the seconds left, or None before anything ended.

        Between two ends it counts down.
        """
        now = self._clock()
        if self._ended is None:
            return None
        if self._estimate is None or (
            self._estimate[0] < self._ended and now - self._estimate[0] >= RENEW_S
        ):
            self._estimate = self._now, self._left()
        at, left = self._estimate
        return max(0.0, left - (now - at))

    def _left(self) -> float:
        """Return the seconds left at the last event.

        Work under way counts as not begun, here and in the rates.
        """
        build, judge = self._rates["build"], self._rates["judge"]
        builds = sum(self._build_s(item) for item in self._items.values())
        judges = sum(self._judge_s(item) for item in self._items.values())
        # Nodes that build while others judge make this factor less than 1; waiting makes it more.
        busy_s = build.busy_s + judge.busy_s
        overlap = (self._now - (self._began or 0.0)) / busy_s if busy_s else 1.0
        return (build.left(builds) + judge.left(judges)) * overlap

    def _pass_time(self) -> None:
        """Add the time since the last event to what was running."""
        now, before = self._clock(), self._now
        for kind in {running.kind for running in self.running.values()}:
            self._rates[kind].busy_s += now - before
        self._now = now

    def _stop(self, event: Event) -> float:
        """Take what ended off the running items; return for how long the item ran, in seconds."""
        running = self.running.pop(event.what, None)
        if running is None:
            return 0.0
        if left := tuple(recipe for recipe in running.recipes if recipe not in event.recipes):
            self.running[event.what] = replace(running, recipes=left)
        return self._now - running.since

    def _end_builds(self, event: Event, item: _Item | None) -> None:
        self._stop(event)
        self._rates["build"].work_s += event.seconds
        self._ended = self._now
        for recipe in event.recipes:
            for name in (recipe, ALL):
                self._builds[name].add(event.seconds, 1)
            if item is not None:
                item.built[recipe] = event.seconds

    def _end_judge(self, event: Event, item: _Item | None) -> None:
        self._rates["judge"].work_s += self._stop(
            event
        )  # an earlier start may have judged it, in event.seconds
        self._ended = self._now
        if item is not None:
            item.done = True
            for name in (item.work.device_class, ALL):
                self._judges[name].add(event.seconds, self._prior(item))

    def _expected(self, item: _Item, recipe: str) -> float:
        """Return the seconds that a build of an item is expected to take."""
        known = item.work.build_s.get(recipe)
        if known is not None:
            return known
        seen = self._builds.get(recipe) or self._builds.get(ALL)
        return seen.value if seen else 0.0

    def _build_s(self, item: _Item) -> float:
        """Return the seconds of the builds left of an item."""
        if item.judging or item.done:  # what was not built by now is skipped
            return 0.0
        return sum(
            self._expected(item, recipe) for recipe in item.work.recipes if recipe not in item.built
        )

    def _judge_s(self, item: _Item) -> float:
        """Return the seconds of the judge of an item."""
        if item.done:
            return 0.0
        if item.work.judge_s is not None:
            return item.work.judge_s
        seen = self._judges.get(item.work.device_class) or self._judges.get(ALL)
        return self._prior(item) * (seen.value if seen else 1.0)

    def _prior(self, item: _Item) -> float:
        """Return the seconds of a judge by its item's builds alone."""
        recipes = {*item.built, *(() if item.judging else item.work.recipes)}
        builds = (
            item.built[recipe] if recipe in item.built else self._expected(item, recipe)
            for recipe in recipes
        )
        return JUDGE_BASE_S + JUDGE_SHARE * sum((item.work.built_s, *builds))
