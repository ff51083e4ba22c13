"""Plan: which builds and judges a campaign needs, and what is finished already. Loads no model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from freezer.device_class import PORTABLE, auto_classes, device_class
from freezer.errors import CatalogError, InfrastructureError, StoreUnreachableError
from freezer.limits import SamplingPolicy
from freezer.recipes import RECIPES, Recipe, made_for, select
from freezer.store import Store
from pipeline.entry import Entry
from pipeline.keys import FileDigests, Key, build_key, differing, judge_key, source_key
from pipeline.ledger import Ledger
from pipeline.outcome import Outcome
from pipeline.parts import Row
from pipeline.policy import LIFT, MOST_STARTS, decide, is_kept, is_missed
from pipeline.tasks import ClassFacts

PORTABLE_TIME_LIMIT_S = 4.0
"""Of sampling a portable artifact, whose speed is reported and decides nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One model for one device class.

    Attributes:
        num_threads: the deciding thread count; `further_threads` are the others.
        builds: for each recipe, the key of its build.
        judge: the key of its judge.
        finished: its outcome, when an earlier campaign has it.
        is_kept: whether the ledger has that just so, with the entry's tags and registered name.
        why: for `--explain`, what makes it differ from the nearest finished outcome.
        before: the outcome that stands unless a recipe of `missed` is built now, which it was reached without.
        missed: the recipes that the circumstances kept from being built then.
        memory_bytes: what its builds and its judge may use; None if nobody knows.
    """

    entry: Entry
    device_class: str
    num_threads: int
    source: Key
    builds: Mapping[str, Key]
    judge: Key
    policy: SamplingPolicy
    finished: Outcome | None
    why: str
    further_threads: tuple[int, ...] = ()
    memory_bytes: int | None = None
    is_kept: bool = False
    before: Outcome | None = None
    missed: tuple[str, ...] = ()

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """The recipes to build."""
        return tuple(RECIPES[name] for name in self.builds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unplaced:
    """A model for a class that no node serves, or none with as many threads."""

    model: str
    device_class: str
    problem: InfrastructureError


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All items of a campaign, in the order of the catalog; the classes of one model stand together.

    Attributes:
        unplaced: models and classes that no node serves, and why, where the others were told to go on.
        problems: entries whose files went away since they were looked at, where the others were told to go on.
        lift_quarantine: whether what crashed in earlier campaigns is tried again.
        facts: what each class is planned for.
    """

    items: tuple[Item, ...]
    unplaced: tuple[Unplaced, ...] = ()
    problems: tuple[CatalogError, ...] = ()
    lift_quarantine: bool = False
    facts: Mapping[str, ClassFacts] = field(default_factory=dict)


def make_plan(
    entries: Sequence[Entry],
    facts: Mapping[str, ClassFacts],
    *,
    auto: Sequence[str],
    device_classes: Sequence[str],
    recipes: Sequence[str],
    store: Store,
    ledger: Ledger,
    digests: FileDigests,
    policy: SamplingPolicy,
    keep_going: bool = False,
    lift_quarantine: bool = False,
    since: float = math.inf,
) -> Plan:
    """The plan of a campaign.

    Args:
        entries: of the catalog.
        facts: for each class that a node can serve, its thread count and toolchain.
        auto: the classes that `auto` stands for on this cluster.
        device_classes, recipes: given on the command line; they take the place of the entries' own.
        store, ledger: what is finished already.
        digests: of files.
        policy: of sampling.
        keep_going: pass over classes that no node serves, or none with as many threads as an entry asks for; and over entries whose
            files cannot be read any more.
        lift_quarantine: try again what crashed in earlier campaigns.
        since: of the start that the campaign goes on from: what it has reached itself since then stands, whatever others did later.

    Raises:
        CatalogError: a file of an entry cannot be read any more.
        InfrastructureError: a class is asked for that no node can serve, or a thread count that not all of its nodes have.
    """
    versions = functools.cache(store.versions)
    items: list[Item] = []
    unplaced: list[Unplaced] = []
    problems: list[CatalogError] = []
    for entry in entries:
        try:
            source = source_key(entry, digests)
            samples = digests.of(Path(entry.samples)) if entry.samples else None
        except OSError as error:  # it could be read before nodes were waited for
            gone = _gone(entry, error)
            if not keep_going:
                raise gone from error
            problems.append(gone)
            continue
        for name in _classes(device_classes or entry.device_classes, auto):
            problem = _no_node(entry, name, facts) or _too_few_threads(entry, name, facts[name])
            if problem is not None:
                if not keep_going:
                    raise problem
                unplaced.append(Unplaced(model=entry.name, device_class=name, problem=problem))
                continue
            wanted = recipes or entry.recipes
            items.append(_item(entry, name, facts[name], source, samples, wanted, versions, ledger, policy, lift_quarantine, since))
    digests.save()
    return Plan(
        items=tuple(items), unplaced=tuple(unplaced), problems=tuple(problems), lift_quarantine=lift_quarantine, facts=facts
    )


def _gone(entry: Entry, error: OSError) -> CatalogError:
    """What is wrong with an entry a file of which cannot be read any more."""
    field = "samples" if entry.samples is not None and error.filename == str(entry.samples) else "source"
    message = f"{type(error).__name__}: {error}; the file was changed while the campaign was started; put it back, and start again"
    return CatalogError(message, entry=entry.name, field=field, code="CP-FETCH")


def _no_node(entry: Entry, name: str, facts: Mapping[str, ClassFacts]) -> InfrastructureError | None:
    if name in facts:
        return None
    return InfrastructureError(
        f"entry {entry.name!r}: no node serves {name}; nodes serve {', '.join(facts)}. Start one with "
        f"`ray start --labels=coldpress.dev/{name}=true`, or leave the class out",
        code="CP-NO-NODE",
    )


def _threads_of(entry: Entry, name: str, facts: ClassFacts) -> tuple[int, ...]:
    """The thread counts to build and judge for; a portable payload is for any, and is judged at what its workers have."""
    return (facts.num_threads,) if name == PORTABLE or not entry.threads else entry.threads


def _too_few_threads(entry: Entry, name: str, facts: ClassFacts) -> InfrastructureError | None:
    """What is wrong where a count is asked for that the smallest worker of a class lacks: it could not be timed there."""
    most = max(_threads_of(entry, name, facts))
    if most <= facts.num_threads:
        return None
    return InfrastructureError(
        f"entry {entry.name!r}: got threads {most}, but the smallest node that serves {name} has {facts.num_threads} CPUs; leave "
        f"the count out, or label with coldpress.dev/{name}=true only nodes that have as many",
        code="CP-NO-NODE",
    )


def auto_classes_of(nodes: Sequence[Sequence[str]]) -> list[str]:
    """What `auto` stands for on a cluster: what it means on each node, each class once."""
    return list(dict.fromkeys(name for classes in nodes for name in auto_classes(classes)))


def _classes(wanted: Sequence[str], auto: Sequence[str]) -> list[str]:
    """The classes of one entry; portable is always among them, and last: it serves where the others do not."""
    found: dict[str, None] = {}
    for name in wanted:
        for resolved in auto if name == "auto" else [name]:
            found[resolved] = None
    found.pop(PORTABLE, None)
    return [*found, PORTABLE]


def _item(
    entry: Entry,
    name: str,
    facts: ClassFacts,
    source: Key,
    samples: str | None,
    recipes: Sequence[str],
    versions: Callable[[str], Sequence[int]],
    ledger: Ledger,
    policy: SamplingPolicy,
    lifted: bool,
    since: float,
) -> Item:
    if name == PORTABLE:
        policy = replace(policy, time_limit_s=min(policy.time_limit_s, PORTABLE_TIME_LIMIT_S))
    num_threads, *further = _threads_of(entry, name, facts)
    builds = {
        recipe.name: build_key(
            entry,
            source,
            made_for(recipe, device_class(name).kind),
            device_class=name,
            num_threads=num_threads,
            toolchain=facts.toolchain,
            samples=samples,
            further_threads=further,
        )
        for recipe in select(recipes, portable=name == PORTABLE)
    }
    judge = judge_key(
        list(builds.values()),
        limits=entry.limits,
        policy=policy,
        num_threads=num_threads,
        samples=samples,
        task_metric=entry.task_metric,
        further_threads=further,
        entry=entry,
        source=source,
        device_class=name,
    )
    memory_bytes = int(entry.limits.memory_gb * 1e9) if entry.limits.memory_gb is not None else facts.memory_bytes
    known, why = _finished(entry, name, source, judge, builds, versions, ledger, memory_bytes, lifted, since)
    finished = None if known is None else replace(known, tags=dict(entry.tags), registered_name=entry.registered_name)
    missed: tuple[str, ...] = ()
    before: Outcome | None = None
    if finished is not None:
        missed, why = _missed(finished, builds, ledger, memory_bytes, lifted)
        finished, before = (None, finished) if missed else (finished, None)
    return Item(
        entry=entry,
        device_class=name,
        num_threads=num_threads,
        further_threads=tuple(further),
        source=source,
        builds=builds,
        judge=judge,
        policy=policy,
        finished=finished,
        why=why,
        memory_bytes=memory_bytes,
        is_kept=finished is not None and finished == known,
        before=before,
        missed=missed,
    )


def _finished(
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
    row: Row, versions: Callable[[str], Sequence[int]], memory_bytes: int | None, lifted: bool
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
    found, _ = _finished(
        item.entry, item.device_class, item.source, item.judge, item.builds, store.versions, ledger, item.memory_bytes, lifted
    )
    if found is None or _missed(found, item.builds, ledger, item.memory_bytes, lifted)[0]:  # it was reached without what ours has
        return None
    return replace(found, tags=dict(item.entry.tags), registered_name=item.entry.registered_name)


def _missed(
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


def _why_new(source: Key, judge: Key, builds: Mapping[str, Key], nearest: Row | None) -> str:
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
