"""Plan: which builds and judges a campaign needs, and which are finished. Loads no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from freezer.errors import CatalogError, InfrastructureError
from freezer.freezing.recipes.recipes import made_for, select
from freezer.hardware.device_classes import PORTABLE, auto_classes, device_class
from freezer.limits import SamplingPolicy
from pipeline.catalog.entry import Entry
from pipeline.planning.file_digests import FileDigests
from pipeline.planning.item import Item, Plan, Unplaced
from pipeline.planning.keys import BuildTarget, Key, build_key, judge_key, source_key
from pipeline.planning.reuse import FinishedWork
from pipeline.records.class_facts import ClassFacts

PORTABLE_TIME_LIMIT_S = 4.0
"""Sampling time of a portable artifact, whose speed is reported and decides nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What to plan.

    Attributes:
        entries: of the catalog.
        facts: thread count and toolchain of each class that a node serves.
        auto: the classes that `auto` means on this cluster.
        device_classes, recipes: replace those of the entries; empty keeps theirs.
        policy: of sampling.
        keep_going: skip entries whose files became unreadable, and classes without a node or without enough threads.
    """

    entries: Sequence[Entry]
    facts: Mapping[str, ClassFacts]
    auto: Sequence[str]
    device_classes: Sequence[str] = ()
    recipes: Sequence[str] = ()
    policy: SamplingPolicy
    keep_going: bool = False


def make_plan(request: PlanRequest, finished: FinishedWork, digests: FileDigests) -> Plan:
    """Plan a campaign.

    Args:
        request: what to plan.
        finished: work of earlier campaigns.
        digests: of files.

    Raises:
        CatalogError: a file of an entry became unreadable.
        InfrastructureError: a class has no node, or not enough threads on all its nodes.
    """
    items: list[Item] = []
    unplaced: list[Unplaced] = []
    problems: list[CatalogError] = []
    for entry in request.entries:
        try:
            source = source_key(entry, digests)
            samples = digests.of(Path(entry.samples)) if entry.samples else None
        except OSError as error:
            problem = _unreadable(entry, error)
            if not request.keep_going:
                raise problem from error
            problems.append(problem)
            continue
        for name in _classes(request.device_classes or entry.device_classes, request.auto):
            lacking = _no_node(entry, name, request.facts) or _too_few_threads(entry, name, request.facts[name])
            if lacking is None:
                items.append(finished.applied_to(_item(request, entry, name, source, samples)))
            elif request.keep_going:
                unplaced.append(Unplaced(model=entry.name, device_class=name, problem=lacking))
            else:
                raise lacking
    digests.save()
    return Plan(
        items=tuple(items),
        unplaced=tuple(unplaced),
        problems=tuple(problems),
        lift_quarantine=finished.lifted,
        facts=request.facts,
    )


def _unreadable(entry: Entry, error: OSError) -> CatalogError:
    """The error of an entry whose file became unreadable while the campaign waited for nodes."""
    field = "samples" if entry.samples is not None and error.filename == str(entry.samples) else "source"
    message = f"{type(error).__name__}: {error}; the file changed while the campaign started; put it back, and start again"
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
    """The thread counts to build and judge for; a portable artifact is judged at the count of its workers."""
    return (facts.num_threads,) if name == PORTABLE or not entry.threads else entry.threads


def _too_few_threads(entry: Entry, name: str, facts: ClassFacts) -> InfrastructureError | None:
    """The error of an entry that asks for more threads than the smallest node of a class can time."""
    most = max(_threads_of(entry, name, facts))
    if most <= facts.num_threads:
        return None
    return InfrastructureError(
        f"entry {entry.name!r}: got threads {most}, but the smallest node that serves {name} has {facts.num_threads} CPUs; leave "
        f"the count out, or label only nodes that have as many with coldpress.dev/{name}=true",
        code="CP-NO-NODE",
    )


def auto_classes_of(nodes: Sequence[Sequence[str]]) -> list[str]:
    """The classes that `auto` means on a cluster, given the classes of each node."""
    return list(dict.fromkeys(name for classes in nodes for name in auto_classes(classes)))


def _classes(wanted: Sequence[str], auto: Sequence[str]) -> list[str]:
    """The classes of an entry. `portable` is always the last one, since it serves where the others do not."""
    found = dict.fromkeys(resolved for name in wanted for resolved in (auto if name == "auto" else [name]))
    return [*(name for name in found if name != PORTABLE), PORTABLE]


def _item(request: PlanRequest, entry: Entry, name: str, source: Key, samples: str | None) -> Item:
    facts, policy = request.facts[name], request.policy
    if name == PORTABLE:
        policy = replace(policy, time_limit_s=min(policy.time_limit_s, PORTABLE_TIME_LIMIT_S))
    num_threads, *further = _threads_of(entry, name, facts)
    target = BuildTarget(
        device_class=name,
        num_threads=num_threads,
        further_threads=tuple(further),
        toolchain=facts.toolchain,
        samples=samples,
    )
    recipes = select(request.recipes or entry.recipes, portable=name == PORTABLE)
    kind = device_class(name).kind
    builds = {recipe.name: build_key(entry, source, made_for(recipe, kind), target) for recipe in recipes}
    memory_gb = entry.limits.memory_gb
    return Item(
        entry=entry,
        device_class=name,
        num_threads=num_threads,
        further_threads=tuple(further),
        source=source,
        builds=builds,
        judge=judge_key(entry, source, list(builds.values()), target, policy),
        policy=policy,
        memory_bytes=facts.memory_bytes if memory_gb is None else int(memory_gb * 1e9),
    )
