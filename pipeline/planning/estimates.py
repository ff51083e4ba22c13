"""What is known of builds and judges before they start: the memory to request from a node, without
loading the model, and what earlier judgements say about the recipes of an architecture.

Ray uses the memory for placement only; worker/sandbox.py limits the child. The estimate only has to
keep a node from running ten large models at once.

Earlier speeds are derived from the outcomes in the ledger. A recipe that was clearly slower than
the winner is not built again for another model of the same architecture, unless its name was
requested. Where only the weights of a model changed, only the recipe that won is built: drift
belongs to weights, and speed to architecture, class, threads and recipe.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

from freezer.codec import JsonView, frozen
from freezer.freezing.recipes import is_exact, needs_torch_alone
from freezer.freezing.sources import FILE_KINDS
from freezer.spec import timing_of
from pipeline.catalog import Entry
from pipeline.ledger import Ledger
from pipeline.planning.keys import differing
from pipeline.planning.plan import Item
from pipeline.records import Outcome, Place

BASE_BYTES = 1_000_000_000
"""Memory of a child with torch and its compiler, and the estimate of a model without weight files.
"""

PER_WEIGHT = 4
"""Copies of the weights: the measured peak of a build is up to 3.4 above its baseline; a judge
holds the model twice, and once in float64."""

STEP_BYTES = 1_000_000_000
"""Demands are rounded up to a power of two of this, since Ray keeps one queue for each distinct
demand.
"""


@frozen
class Demand:
    """Memory of one item, in bytes.

    Attributes:
        asked: requested from Ray, if a node has as much.
        least: required; a node that has less is not used.
        firm: `asked` corrects a failure for lack of memory: if no node has as much, only the
            largest is used.
    """

    asked: int
    least: int
    firm: bool = False


def demand_of(entry: Entry) -> Demand:
    """Return the demand of an entry whose files are here."""
    if entry.limits.memory_gb is not None:
        given = int(entry.limits.memory_gb * 1e9)
        return Demand(asked=given, least=given)
    weights = _weights_bytes(entry)
    return Demand(asked=_step(BASE_BYTES + PER_WEIGHT * weights), least=weights)


def learned(demand: Demand, used_bytes: int) -> Demand:
    """Return a demand that covers the measured memory of a task of the same model."""
    return demand if used_bytes <= demand.asked else replace(demand, asked=_step(used_bytes))


def _weights_bytes(entry: Entry) -> int:
    """Return the size of the files of a model; 0 if it is not known yet."""
    location = Path(entry.source.location)
    files = [*entry.files]
    if entry.source.kind in FILE_KINDS:
        files.append(location)
    elif entry.source.kind == "transformers" and location.is_dir():
        files += location.rglob("*")
    return sum(path.stat().st_size for path in files if path.is_file())


def _step(size: int) -> int:
    step = STEP_BYTES
    while step < size:
        step *= 2
    return step


REACH = 0.9
"""A recipe may win if the upper bound of its speedup is at least this share of the winner's
speedup.
"""


@frozen
class EarlierSpeed:
    """The newest figures of a recipe for an architecture.

    Attributes:
        share: speedup as a share of the fastest one in the same judgement; `most` is its upper
            bound.
        words: what was measured, for people.
    """

    share: float
    most: float
    words: str


MAX_INHERITED = 9
"""Retrained versions in a row that inherit the speed of one contest. The tenth is timed again."""

UNUSUAL = 2.0
"""Multiple of the drift of the contest above which a retrained version is timed again."""


@frozen
class Contest:
    """The newest judge of a model and class that timed all recipes and published one.

    Attributes:
        recipes: the one that won, and, if that needs an engine, the fastest that needs torch alone.
        error_ratio: drift of the winner.
        parts: parts of the item's keys.
        version: version that it published.
        num_inherited: number of versions that inherited its speed.
    """

    recipes: tuple[str, ...]
    architecture: str
    error_ratio: float
    parts: JsonView
    version: int | None
    num_inherited: int = 0

    def holds_for(self, item: Item) -> bool:
        """Whether an item may inherit the speed: nothing but its source differs, and no recipe was
        requested by name.
        """
        differences = differing(item.parts, self.parts)
        is_retrained = all(name.startswith("source.") for name in differences)
        few = self.num_inherited < MAX_INHERITED
        return few and is_retrained and set(item.builds) == set(item.optional)


_Known = dict[tuple[str, str, int], dict[str, EarlierSpeed]]
"""By architecture, device class and thread count, then by recipe."""


class EarlierSpeeds:
    """Figures of earlier judgements, by architecture, device class and thread count.

    Args:
        ledger: whose outcomes are read when the first figure is needed.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._contests: dict[Place, Contest] = {}

    @cached_property
    def _known(self) -> _Known:
        known: _Known = {}
        for row in self._ledger.rows("outcome"):
            outcome = row.outcome
            _take_in(outcome, known)
            self._take_in_contest(outcome, row.data.get("parts", {}))
        return known

    def _take_in_contest(self, outcome: Outcome, parts: JsonView) -> None:
        place = outcome.place
        before = self._contests.get(place)
        if outcome.verdict != "published" or outcome.recipe is None:
            return
        if outcome.clock == "inherited":
            if before is not None:
                self._contests[place] = replace(before, num_inherited=before.num_inherited + 1)
            return
        error_ratio = outcome.figures.drift.error_ratio
        if outcome.clock not in ("wall", "cpu") or not outcome.architecture or error_ratio is None:
            return
        recipes = [outcome.recipe]
        alone = [
            (report.figures.speedup, report.recipe)
            for report in outcome.candidates
            if report.problem is None
            and report.figures.speedup
            and needs_torch_alone(report.recipe)
        ]
        if alone and not needs_torch_alone(outcome.recipe):
            recipes.append(max(alone)[1])
        self._contests[place] = Contest(
            recipes=tuple(recipes),
            architecture=outcome.architecture,
            error_ratio=error_ratio,
            parts=parts,
            version=outcome.version,
        )

    def contest(self, item: Item) -> Contest | None:
        """The contest whose winner's speed an item may inherit."""
        _ = self._known
        contest = self._contests.get((item.entry.name, item.device_class))
        return contest if contest is not None and contest.holds_for(item) else None

    def any_for(self, item: Item) -> bool:
        """Whether some architecture has figures for the class and thread count of an item."""
        wanted = (item.device_class, item.num_threads)
        return any(place[1:] == wanted for place in self._known)

    def hopeless(self, item: Item, architecture: str) -> dict[str, str]:
        """The optional recipes of an item that cannot be expected to win, each with the reason."""
        known = self._known.get((architecture, item.device_class, item.num_threads), {})
        with_torch_alone = [found for name, found in known.items() if needs_torch_alone(name)]
        best = max(with_torch_alone, key=lambda found: found.share, default=None)
        hopeless = {}
        contest = self.contest(item)
        if contest is not None and contest.architecture == architecture:
            words = (
                f"only the weights changed since version {contest.version}, where"
                f" {contest.recipes[0]} won"
            )
            return {name: words for name in item.optional if name not in contest.recipes}
        for recipe in item.optional:
            found = known.get(recipe)
            if found is not None and found.most < REACH and found is not best:
                hopeless[recipe] = found.words
        return hopeless

    def add(self, outcome: Outcome) -> None:
        """Take in a new outcome."""
        _take_in(outcome, self._known)


def _take_in(outcome: Outcome, known: _Known) -> None:
    """Take in the candidates of an undisturbed judgement by medians that passed the drift gate."""
    by_median = timing_of(outcome.objective) == "p50"
    judged = outcome.verdict in ("published", "kept-eager", "kept-previous")
    if not (outcome.architecture and judged and by_median) or outcome.clock == "disturbed":
        return
    measured = {}  # speedup and its upper bound
    for report in outcome.candidates:
        figures = report.figures
        if report.problem is None and figures.speedup and figures.speedup_ci:
            measured[report.recipe] = figures.speedup, figures.speedup_ci[1]
    if not measured:
        return
    speeds = known.setdefault((outcome.architecture, outcome.device_class, outcome.num_threads), {})
    for recipe, (speedup, most) in measured.items():
        # A lower precision may break its budget with other weights.
        rivals = [name for name in measured if is_exact(name) or not is_exact(recipe)]
        fastest = max(rivals, key=lambda name: measured[name][0])
        best = measured[fastest][0]
        speeds[recipe] = EarlierSpeed(
            share=speedup / best,
            most=most / best,
            words=(
                f"{speedup:.2f} times as fast as eager for {outcome.model}, of the same"
                f" architecture; {fastest} was faster"
            ),
        )
