"""Plan: which builds and judges a campaign needs, and what is finished already. Loads no model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from freezer.errors import CatalogError, InfrastructureError
from freezer.freezing.recipes.recipes import made_for, select
from freezer.hardware.device_classes import PORTABLE, auto_classes, device_class
from freezer.limits import SamplingPolicy
from freezer.store.store import Store
from pipeline.catalog.entry import Entry
from pipeline.ledger.ledger import Ledger
from pipeline.planning.file_digests import FileDigests
from pipeline.planning.item import Item, Plan, Unplaced
from pipeline.planning.keys import Key, build_key, judge_key, source_key
from pipeline.planning.reuse import find_finished, find_missed
from pipeline.records.class_facts import ClassFacts
from pipeline.records.outcome import Outcome

PORTABLE_TIME_LIMIT_S = 4.0
"""Of sampling a portable artifact, whose speed is reported and decides nothing."""


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
    known, why = find_finished(entry, name, source, judge, builds, versions, ledger, memory_bytes, lifted, since)
    finished = None if known is None else replace(known, tags=dict(entry.tags), registered_name=entry.registered_name)
    missed: tuple[str, ...] = ()
    before: Outcome | None = None
    if finished is not None:
        missed, why = find_missed(finished, builds, ledger, memory_bytes, lifted)
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
