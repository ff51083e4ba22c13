"""Results of builds in the ledger and the store: what earlier campaigns finished, and what this one adds."""

from __future__ import annotations

from collections.abc import Mapping

from freezer.store.store import Store
from pipeline.failures.policy import is_kept
from pipeline.ledger.ledger import Ledger
from pipeline.planning.memory_estimate import Demand, demand_of, learned
from pipeline.planning.plan import Item
from pipeline.records.outcome import FinishedBuild
from pipeline.worker.requests import BuildResult
from pipeline.workspace.layout import build_wall_s
from pipeline.workspace.workspace import workplace


class BuildRecords:
    """Finds and appends results of builds.

    Args:
        store, ledger: of the campaign.
        lifted: whether quarantined builds are retried.
    """

    def __init__(self, store: Store, ledger: Ledger, *, lifted: bool) -> None:
        self._store, self._ledger, self._lifted = store, ledger, lifted
        self._place = workplace(store.uri)

    def estimate(self, item: Item) -> Demand:
        """Return the memory estimate of an item: of its files, or the peak of its last build, possibly with other weights."""
        row = self._ledger.nearest("build", item.entry.name, item.device_class)
        return learned(demand_of(item.entry), 0 if row is None else FinishedBuild.from_json(row.data).peak_bytes)

    def finished(self, item: Item) -> dict[str, BuildResult]:
        """Return the builds of an item that need not run, by recipe."""
        found = {recipe: self._finished(item, recipe, key.digest) for recipe, key in item.builds.items()}
        return {recipe: result for recipe, result in found.items() if result is not None}

    def _finished(self, item: Item, recipe: str, key: str) -> BuildResult | None:
        """Return a candidate in the store, or a failure that only another key can fix."""
        row = self._ledger.find("build", key)
        known = None if row is None else FinishedBuild.from_json(row.data)
        # A candidate that this campaign built before it was stopped, or whose row no driver wrote, counts as this campaign's work.
        own_s = known.wall_s if known and row and row.campaign == self._ledger.campaign else 0.0
        if self._place.is_listed("candidates", key):
            wall_s = build_wall_s(self._store.uri, key) if known is None else own_s
            return BuildResult(key=key, recipe=recipe, cached=True, wall_s=wall_s)
        if known is None or known.failure is None:
            return None
        if not is_kept(known.failure, memory_bytes=item.memory_bytes, lifted=self._lifted):
            return None
        return BuildResult(key=key, recipe=recipe, cached=True, failure=known.failure, wall_s=own_s)

    def removed(self, results: Mapping[str, BuildResult]) -> tuple[str, ...]:
        """Return the recipes whose candidate was built and is no longer in the store."""
        built = {recipe: result.key for recipe, result in results.items() if result.failure is None}
        return tuple(recipe for recipe, key in built.items() if not self._place.has("candidates", key))

    def add(self, item: Item, result: BuildResult) -> None:
        """Append a result to the ledger, with the number of campaign starts in which the build failed."""
        row = self._ledger.find("build", result.key, model=item.entry.name)
        before = None if row is None else FinishedBuild.from_json(row.data)
        failed_before = before.starts if before and before.failure else 0
        self._ledger.append(
            "build",
            result.key,
            model=item.entry.name,
            device_class=item.device_class,
            data=FinishedBuild(
                recipe=result.recipe,
                failure=result.failure,
                wall_s=result.wall_s,
                peak_bytes=result.peak_bytes,
                starts=failed_before + 1 if result.failure else 0,
            ).to_json(),
        )
