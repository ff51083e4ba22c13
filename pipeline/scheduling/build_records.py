"""Results of builds in the ledger and the store: those that earlier campaigns finished, and those
that this one adds.
"""

from __future__ import annotations

from dataclasses import replace

from freezer.store import Store
from pipeline.failures import is_kept
from pipeline.ledger import Ledger
from pipeline.planning import EarlierSpeeds, Item, demand_of, learned
from pipeline.records import BuildResult, Outcome
from pipeline.scheduling.item_state import ItemState, Step, start
from pipeline.workspace import architecture_of, workplace


class BuildRecords:
    """Finished builds of a campaign.

    Args:
        store, ledger: store and ledger of the campaign.
        lifted: whether quarantined builds are retried.

    Attributes:
        speeds: earlier speeds, which rule out some recipes.
    """

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        *,
        lifted: bool,
    ) -> None:
        self._ledger = ledger
        self._lifted = lifted
        self._workplace = workplace(store.uri)
        self.speeds = EarlierSpeeds(ledger)

    def start(self, item: Item) -> Step:
        """Return how an item starts: what need not be built, and whether one build decides what
        else need not be.

        The memory estimate covers the peak of its last build, possibly with other weights.
        """
        row = self._ledger.nearest("build", item.entry.name, item.device_class)
        peak_bytes = 0 if row is None else row.build.peak_bytes
        state = ItemState(
            item=item,
            estimate=learned(demand_of(item.entry), peak_bytes),
        )
        finished = {}
        architecture = ""
        for recipe, key in item.builds.items():
            result = self._finished(item, recipe, key.digest)
            if result is not None:
                finished[recipe] = result
                architecture = architecture or result.architecture
        if architecture or not item.optional:
            return start(state, finished, self.speeds.hopeless(item, architecture))
        contest = self.speeds.contest(item)
        first: tuple[str, ...] = ()
        if contest is not None:
            first = contest.recipes
        elif self.speeds.any_for(item):
            first = (next(iter(item.builds)),)
        return start(state, finished, {}, first=first)

    def _finished(self, item: Item, recipe: str, key: str) -> BuildResult | None:
        """Return a candidate in the store, or a failure that only another key can fix."""
        row = self._ledger.find("build", key)
        if row is not None:
            known = row.build
        else:  # a driver may be killed before it records what a worker stored
            architecture = architecture_of(self._workplace, key)
            known = BuildResult(key=key, recipe=recipe, architecture=architecture)
        if self._workplace.is_listed("candidates", key):
            known = replace(known, failure=None)
        elif known.failure is None or not is_kept(
            known.failure,
            memory_bytes=item.memory_bytes,
            timeout_s=item.entry.limits.timeout_s,
            lifted=self._lifted,
        ):
            return None
        # What this campaign built before it was stopped counts as its work.
        is_own = row is not None and row.campaign == self._ledger.campaign
        return known if is_own else replace(known, wall_s=0.0)

    def counted(self, item: Item, outcome: Outcome) -> Outcome:
        """Return an outcome whose failure has its number of campaign starts."""
        row = self._ledger.find("outcome", item.judge.digest, model=outcome.model)
        if row is None or outcome.failure is None:
            return outcome
        return replace(outcome, failure=outcome.failure.counted(row.outcome.failure))

    def add(self, item: Item, result: BuildResult) -> None:
        """Append a result to the ledger, with the number of campaign starts in which the build
        failed.
        """
        name = item.entry.name
        failure = result.failure
        row = self._ledger.find("build", result.key, model=name)
        if failure and row:
            failure = failure.counted(row.build.failure)
        self._ledger.append(
            "build",
            result.key,
            model=name,
            device_class=item.device_class,
            data=replace(result, failure=failure).to_json(),
        )
