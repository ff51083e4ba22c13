"""Find the outcomes of earlier campaigns that a plan can reuse."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import cache

from freezer.errors import StoreUnreachableError
from freezer.store.store import Store
from pipeline.failures.policy import LIFT, MOST_STARTS, decide, is_kept, is_missed
from pipeline.ledger.ledger import Ledger
from pipeline.ledger.segments import LedgerRow
from pipeline.planning.item import Item
from pipeline.planning.keys import differing
from pipeline.records.failure import Failure
from pipeline.records.finished_build import FinishedBuild
from pipeline.records.outcome import Outcome


class FinishedWork:
    """Outcomes of earlier campaigns, in a ledger and a store that stay as they are while this object is used.

    Args:
        store, ledger: of the campaign.
        lifted: whether quarantined failures are retried.
        since: start of the campaign that is continued: its own outcomes since then count before later ones of other campaigns.
    """

    def __init__(self, store: Store, ledger: Ledger, *, lifted: bool = False, since: float = math.inf) -> None:
        self._ledger, self.lifted, self._since = ledger, lifted, since
        self._versions = cache(store.versions)

    def applied_to(self, item: Item) -> Item:
        """Return a planned item with its finished outcome, or what was missed in it, and why."""
        known, why = self._find(item)
        if known is None:
            return replace(item, why=why)
        finished = replace(known, tags=dict(item.entry.tags), registered_name=item.entry.registered_name)
        missed, why = self._find_missed(item, finished)
        if missed:
            return replace(item, why=why, before=finished, missed=missed)
        return replace(item, why=why, finished=finished, is_kept=finished == known)

    def found_meanwhile(self, item: Item) -> Outcome | None:
        """Return the outcome that another campaign reached since an item was planned; None if it used fewer builds, or none did."""
        if item.before is not None:
            return None
        with suppress(StoreUnreachableError):  # the work is then done twice
            self._ledger.refresh()
        return self.applied_to(item).finished

    def _find(self, item: Item) -> tuple[Outcome | None, str]:
        """Return the finished outcome of an item if it still holds, and why or why not in one line."""
        own = self._ledger.own("outcome", item.judge.digest, item.entry.name)
        if own is not None and own.time >= self._since:
            found, why = self._check(item, own)
            if found is not None:
                return found, why
        row = self._ledger.find("outcome", item.judge.digest, model=item.entry.name)
        if row is not None:
            return self._check(item, row)
        other = self._ledger.find("outcome", item.judge.digest)
        if other is not None:
            return None, f"the same work was done under the name {other.model!r}"
        return None, _why_new(item, self._ledger.nearest("outcome", item.entry.name, item.device_class))

    def _check(self, item: Item, row: LedgerRow) -> tuple[Outcome | None, str]:
        """Return the outcome of a row if it still holds, and why or why not in one line."""
        outcome = Outcome.from_json(row.data["outcome"])
        failure = outcome.failure
        if outcome.verdict == "unstable":
            return None, "was unstable (disturbed), which is never kept"
        if failure is not None and not is_kept(failure, memory_bytes=item.memory_bytes, lifted=self.lifted):
            return None, f"failed earlier ({failure.kind}), {_not_kept(failure)}"
        if outcome.version is not None and outcome.version not in self._versions(row.model):
            return None, f"version {outcome.version} is gone from the store"
        return outcome.as_cached(), "unchanged"

    def _find_missed(self, item: Item, outcome: Outcome) -> tuple[tuple[str, ...], str]:
        """Return the recipes that an outcome lacks and that are to be built now, and what to tell the user about them."""
        again: list[str] = []
        words: list[str] = []
        for report in outcome.candidates if outcome.failure is None else ():
            recipe = report.recipe
            if report.failure is None or recipe not in item.builds:
                continue
            row = self._ledger.find("build", item.builds[recipe].digest, model=outcome.model)
            if row is None:
                continue
            build = FinishedBuild.from_json(row.data)
            failure, starts = build.failure, build.starts
            if failure is None:
                again.append(recipe)
                words.append(f"{recipe} was built since, and never judged")
            elif is_missed(failure, num_starts=starts, memory_bytes=item.memory_bytes, lifted=self.lifted):
                again.append(recipe)
                words.append(f"{recipe} failed ({failure.kind}); retrying, start {starts + 1} of {max(MOST_STARTS, starts + 1)}")
            elif decide(failure.kind, failure.code).kept == "never":
                words.append(f"{recipe} failed ({failure.kind}) in {starts} starts; retried only with {LIFT}")
        return tuple(again), "; ".join(words) or "unchanged"


def _not_kept(failure: Failure) -> str:
    match decide(failure.kind, failure.code).kept:
        case "quarantine":
            return f"retrying because {LIFT} was given"
        case "memory":
            return "and may use more memory now"
        case _:
            return "which is never kept"


def _why_new(item: Item, nearest: LedgerRow | None) -> str:
    """Return how an item differs from the nearest finished one."""
    if nearest is None:
        return "never done"
    before = nearest.data.get("parts", {})
    names = [part for part in differing(item.judge.parts, before.get("judge", {})) if part != "builds"]
    if "source" in before:  # earlier releases recorded no parts of a source
        names += [f"source.{part}" for part in differing(item.source.parts, before["source"])]
    for recipe, build in item.builds.items():
        earlier = before.get("builds", {}).get(recipe)
        parts = [] if earlier is None else differing(build.parts, earlier)
        names += [recipe] if earlier is None else [f"{recipe}: {part}" for part in parts if part != "source" or not names]
    names += [f"no {recipe}" for recipe in before.get("builds", {}) if recipe not in item.builds]
    return f"differs from the nearest finished in {', '.join(dict.fromkeys(names)) or 'nothing that is recorded'}"
