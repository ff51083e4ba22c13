"""Finished work: which outcomes of earlier campaigns still hold, and what was missed in them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from freezer.hardware import PORTABLE
from freezer.store import LATEST, Store, loss_of
from pipeline.failures import LIFT, MOST_STARTS, TIMEOUT_STARTS, is_kept, kept_after
from pipeline.ledger import Ledger, LedgerRow
from pipeline.planning.keys import differing
from pipeline.planning.plan import Item
from pipeline.records import Outcome

_MOST: dict[str | None, int] = {"never": MOST_STARTS, "limit": TIMEOUT_STARTS}
"""Limit of campaign starts that retry a recipe, by what is kept."""


NUM_READERS = 32
"""Items that are looked up in a bucket at once: each request takes milliseconds."""


class FinishedWork:
    """Outcomes of earlier campaigns, in a ledger and a store that stay as they are while this
    object is used.

    Args:
        store, ledger: of the campaign.
        lifted: whether quarantined failures are retried.

    Attributes:
        repairs: a line for each finished artifact that the store has lost.
    """

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        *,
        lifted: bool = False,
    ) -> None:
        self._ledger = ledger
        self.lifted = lifted
        self._store = store
        self.repairs: list[str] = []

    def applied_to_all(self, items: Sequence[Item]) -> tuple[Item, ...]:
        """Return planned items as `applied_to` does."""
        if self._store.remote is None:
            return tuple(map(self.applied_to, items))
        with ThreadPoolExecutor(NUM_READERS) as pool:
            return tuple(pool.map(self.applied_to, items))

    def applied_to(self, item: Item) -> Item:
        """Return a planned item with its finished outcome, or what was missed in it, and why."""
        known, why = self._find(item)
        if known is None:
            return replace(item, why=why)
        entry = item.entry
        finished = replace(
            known,
            tags=entry.tags,
            registered_name=entry.registered_name,
        )
        missed, why = self._find_missed(item, finished)
        if missed:
            return replace(
                item,
                why=why,
                before=finished,
                missed=missed,
            )
        return replace(item, why=why, finished=finished, renamed=finished != known)

    def _find(self, item: Item) -> tuple[Outcome | None, str]:
        """Return the finished outcome of an item if it still holds, and why or why not in
        one line.
        """
        row = self._ledger.find("outcome", item.judge.digest, model=item.entry.name)
        if row is not None:
            return self._check(item, row)
        nearest = self._ledger.nearest("outcome", item.entry.name, item.device_class)
        return None, _why_new(item, nearest)

    def _check(self, item: Item, row: LedgerRow) -> tuple[Outcome | None, str]:
        """Return the outcome of a row if it still holds, and why or why not in one line."""
        outcome = row.outcome
        failure = outcome.failure
        if outcome.verdict == "unstable":
            return None, "was unstable (disturbed), which is never kept"
        if outcome.clock == "none" and not item.emulated:
            return None, "was judged on an emulated CPU; timing it on a real one"
        noisy = outcome.clock == "disturbed" and item.device_class != PORTABLE
        if noisy and not item.policy.accept_noise:
            return None, "was measured on a busy machine with --accept-noise"
        if not is_kept(
            failure,
            memory_bytes=item.memory_bytes,
            timeout_s=item.entry.limits.timeout_s,
            lifted=self.lifted,
        ):
            assert failure is not None
            return None, f"failed earlier ({failure.kind}); retrying"
        if outcome.verdict == "kept-previous":
            if item.entry.limits.allow_regression:
                return None, "was kept-previous; judging again because --allow-regression was given"
            previous = outcome.previous
            if previous is None or previous.artifact != self._serving(row.model, item.device_class):
                return None, "was kept-previous, and another artifact serves now"
        number = LATEST if outcome.verdict == "kept-previous" else outcome.version
        if number is not None:
            problem = loss_of(self._store, f"{row.model}:{number}", item.device_class)
            if problem:
                self.repairs.append(f"{item.label()}: {problem}; making it again")
                return None, f"files of version {number} are missing"
        return replace(outcome, cached=True), "unchanged"

    def _serving(self, model: str, device_class: str) -> str | None:
        """Return the digest of the image of the artifact that serves a class; None without one that
        can be read.
        """
        version = self._store.find(model)
        image = version.images.get(device_class) if version else None
        return image.digest if image else None

    def _find_missed(self, item: Item, outcome: Outcome) -> tuple[tuple[str, ...], str]:
        """Return the recipes that an outcome lacks and that are to be built now, and a line that
        reports them.
        """
        if outcome.failure is not None:
            return (), "unchanged"
        again = []
        lines = []
        for recipe in outcome.missing:
            key = item.builds.get(recipe)
            row = self._ledger.find("build", key.digest, model=outcome.model) if key else None
            if row is None:
                continue
            failure = row.build.failure
            kept = kept_after(failure) if failure else None
            if failure is None:
                again.append(recipe)
                lines.append(f"{recipe} was built since, and never judged")
            elif not is_kept(
                failure,
                most_starts=MOST_STARTS,
                memory_bytes=item.memory_bytes,
                timeout_s=item.entry.limits.timeout_s,
                lifted=self.lifted,
            ):
                start = failure.starts + 1
                of = max(_MOST.get(kept, MOST_STARTS), start)
                again.append(recipe)
                lines.append(f"{recipe} failed ({failure.kind}); retrying, start {start} of {of}")
            elif kept in _MOST:
                lines.append(
                    f"{recipe} failed ({failure.kind}) in {failure.starts} starts; retried only"
                    f" with {LIFT}"
                )
        return tuple(again), "; ".join(lines) or "unchanged"


def _why_new(item: Item, nearest: LedgerRow | None) -> str:
    """Return how an item differs from the nearest finished one."""
    if nearest is None:
        return "never done"
    differences = differing(item.parts, nearest.data.get("parts", {}))
    words = [name.removeprefix("judge.").removeprefix("builds.") for name in differences]
    return f"differs from the nearest finished in {', '.join(words) or 'nothing that is recorded'}"
