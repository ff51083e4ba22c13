"""Find the outcomes of earlier campaigns that a plan can reuse."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from freezer.errors import StoreUnreachableError
from freezer.store.store import Store
from pipeline.catalog.entry import Entry
from pipeline.failures.policy import LIFT, MOST_STARTS, decide, is_kept, is_missed
from pipeline.ledger.ledger import Ledger
from pipeline.ledger.segments import LedgerRow
from pipeline.planning.item import Item
from pipeline.planning.keys import Key, differing
from pipeline.records.outcome import Outcome


def find_finished(
    entry: Entry,
    name: str,
    source: Key,
    judge: Key,
    builds: Mapping[str, Key],
    versions: Callable[[str], Sequence[int]],
    ledger: Ledger,
    memory_bytes: int | None,
    lifted: bool,
    since: float = math.inf,
) -> tuple[Outcome | None, str]:
    """The finished outcome of a judge key, if it still holds, and why or why not in one line."""
    own = ledger.own("outcome", judge.digest, entry.name)
    if own is not None and own.time >= since:
        found, why = _standing(own, versions, memory_bytes, lifted)
        if found is not None:
            return found, why
    row = ledger.find("outcome", judge.digest, model=entry.name)
    if row is None:
        other = ledger.find("outcome", judge.digest)
        if other is not None:
            return None, f"the same work was done under the name {other.model!r}"
        return None, _why_new(source, judge, builds, ledger.nearest("outcome", entry.name, name))
    return _standing(row, versions, memory_bytes, lifted)


def _standing(
    row: LedgerRow, versions: Callable[[str], Sequence[int]], memory_bytes: int | None, lifted: bool
) -> tuple[Outcome | None, str]:
    """The outcome of a row, if it still holds, and why or why not in one line."""
    outcome = Outcome.from_json(row.data["outcome"])
    if outcome.verdict == "unstable":
        return None, "was unstable (disturbed), which is never kept"
    tried = outcome.tried_bytes
    if not is_kept(outcome.failure, outcome.code, tried_bytes=tried, memory_bytes=memory_bytes, lifted=lifted):
        return None, f"was failed ({outcome.failure}), {_not_kept(str(outcome.failure), outcome.code)}"
    if outcome.version is not None and outcome.version not in versions(row.model):
        return None, f"version {outcome.version} is gone from the store"
    return outcome.as_cached(), "unchanged"


def found_meanwhile(item: Item, store: Store, ledger: Ledger, *, lifted: bool) -> Outcome | None:
    """The finished outcome of an item that had none when it was planned: another campaign was faster. None if it has none still."""
    if item.finished is not None or item.before is not None:
        return item.finished
    with suppress(StoreUnreachableError):  # then it is done twice
        ledger.refresh()
    found, _ = find_finished(
        item.entry, item.device_class, item.source, item.judge, item.builds, store.versions, ledger, item.memory_bytes, lifted
    )
    if (
        found is None or find_missed(found, item.builds, ledger, item.memory_bytes, lifted)[0]
    ):  # it was reached without what ours has
        return None
    return replace(found, tags=dict(item.entry.tags), registered_name=item.entry.registered_name)


def find_missed(
    outcome: Outcome, builds: Mapping[str, Key], ledger: Ledger, memory_bytes: int | None, lifted: bool
) -> tuple[tuple[str, ...], str]:
    """The recipes that an outcome was reached without, and that are to be tried again; and all that people should know of it."""
    again: list[str] = []
    words: list[str] = []
    for report in outcome.candidates if outcome.failure is None else ():
        if report.failure is None or report.recipe not in builds:
            continue
        row = ledger.find("build", builds[report.recipe].digest, model=outcome.model)
        if row is None:
            continue
        if row.data["failure"] is None:
            again.append(report.recipe)
            words.append(f"{report.recipe} was built since, and never judged")
            continue
        failure, code, starts = row.data["failure"], row.data.get("code"), row.data.get("starts", 1)
        tried = row.data.get("tried_bytes")
        if is_missed(failure, code, num_starts=starts, tried_bytes=tried, memory_bytes=memory_bytes, lifted=lifted):
            again.append(report.recipe)
            words.append(
                f"{report.recipe} failed ({failure}) and is tried again, start {starts + 1} of {max(MOST_STARTS, starts + 1)}"
            )
        elif decide(failure, code).kept == "never":
            words.append(f"{report.recipe} failed ({failure}) in {starts} starts, and is tried again with {LIFT} alone")
    return tuple(again), "; ".join(words) or "unchanged"


def _not_kept(failure: str, code: str | None) -> str:
    match decide(failure, code).kept:
        case "quarantine":
            return "whose quarantine is lifted"
        case "memory":
            return "and may use more memory now"
        case _:
            return "which is never kept"


def _why_new(source: Key, judge: Key, builds: Mapping[str, Key], nearest: LedgerRow | None) -> str:
    if nearest is None:
        return "never done"
    before = nearest.data.get("parts", {})
    names = [part for part in differing(judge.parts, before.get("judge", {})) if part != "builds"]
    if "source" in before:  # earlier releases did not keep the parts of a source
        names += [f"source.{part}" for part in differing(source.parts, before["source"])]
    for recipe, build in builds.items():
        earlier = before.get("builds", {}).get(recipe)
        parts = [] if earlier is None else differing(build.parts, earlier)
        names += [recipe] if earlier is None else [f"{recipe}: {part}" for part in parts if part != "source" or not names]
    names += [f"no {recipe}" for recipe in before.get("builds", {}) if recipe not in builds]
    return f"differs from the nearest finished in {', '.join(dict.fromkeys(names)) or 'nothing that is recorded'}"
