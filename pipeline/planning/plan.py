"""Plan: which builds and judges a campaign needs. Loads no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from freezer.codec import Json, frozen
from freezer.errors import CatalogError, ColdpressError, InfrastructureError
from freezer.freezing.choices import check_consented, left_out, select
from freezer.freezing.recipes import made_for
from freezer.hardware import PORTABLE, auto_classes, counts_within, device_class
from freezer.spec import Limits, SamplingPolicy
from pipeline.catalog import Entry
from pipeline.planning.keys import BuildTarget, FileDigests, Key, build_key, judge_key, source_key
from pipeline.records import LABEL, ClassFacts, Failure, FleetFacts, Outcome

if TYPE_CHECKING:
    from pipeline.planning.finished_work import FinishedWork

PORTABLE_TIME_LIMIT_S = 4.0
"""Sampling time of a portable artifact, whose speed is reported and decides nothing."""


@frozen
class Item:
    """One model for one device class.

    Attributes:
        threads: the counts to judge for, the deciding one first.
        builds: the key of the build of each recipe.
        judge: the key of its judge.
        finished: its outcome, if an earlier campaign reached it.
        why: how it differs from the nearest finished outcome, for `--explain`.
        before: the outcome to keep unless a recipe of `missed` is built now.
        missed: recipes that circumstances kept from being built for `before`.
        renamed: whether `finished` has other tags or another registered name than recorded.
        optional: recipes that were not requested by name, and may be skipped.
        emulated: whether only nodes with emulated CPUs serve the class.
        memory_bytes: memory that its builds and its judge may use; None if unknown.
    """

    entry: Entry
    device_class: str
    threads: tuple[int, ...]
    source: Key
    builds: Mapping[str, Key]
    judge: Key
    policy: SamplingPolicy
    finished: Outcome | None = None
    why: str = ""
    memory_bytes: int | None = None
    before: Outcome | None = None
    missed: tuple[str, ...] = ()
    renamed: bool = False
    optional: tuple[str, ...] = ()
    emulated: bool = False

    @property
    def num_threads(self) -> int:
        """The deciding thread count."""
        return self.threads[0]

    @property
    def parts(self) -> Json:
        """The parts of its keys, for a later `--explain`."""
        builds = {name: key.parts for name, key in self.builds.items()}
        return {"source": self.source.parts, "judge": self.judge.parts, "builds": builds}

    def label(self, recipe: str | None = None) -> str:
        """`model class`, or `model class recipe`, for people."""
        return " ".join(word for word in (self.entry.name, self.device_class, recipe) if word)


@frozen
class Plan:
    """All items of a campaign, in the order of the catalog; the classes of a model are adjacent.

    Attributes:
        skipped: the outcomes that --keep-going skips because no node serves their class.
        lift_quarantine: whether items that crashed or hung in earlier campaigns are retried.
        facts: thread count and toolchain of each class.
        notes: lines for people: recipes that are left out, and finished artifacts that the store
            has lost.
    """

    items: tuple[Item, ...]
    skipped: tuple[Outcome, ...]
    lift_quarantine: bool
    facts: FleetFacts
    notes: tuple[str, ...]

    @property
    def is_finished(self) -> bool:
        """Whether earlier campaigns reached every outcome."""
        return all(item.finished for item in self.items)


@frozen
class PlanRequest:
    """What to plan.

    Attributes:
        entries: of the catalog.
        facts: thread count and toolchain of each class that a node serves.
        nodes: the classes of each node, which decide what `auto` means.
        policy: of sampling.
        keep_going: skip classes without a node or without enough threads.
    """

    entries: Sequence[Entry]
    facts: FleetFacts
    nodes: Sequence[Sequence[str]]
    policy: SamplingPolicy
    keep_going: bool = False


def make_plan(request: PlanRequest, finished: FinishedWork, digests: FileDigests) -> Plan:
    """Plan a campaign.

    Args:
        request: what to plan.
        finished: the work of earlier campaigns.
        digests: the digests of files.

    Raises:
        CatalogError: a file of an entry became unreadable.
        InfrastructureError: a class has no node, or not enough threads on all its nodes.
    """
    items = []
    skipped = []
    for entry in request.entries:
        try:
            source = source_key(entry, digests)
            samples = _samples(entry, digests)
        except OSError as error:
            raise CatalogError(
                f"{error}; put the file back, and start again", entry=entry.name, code="CP-FETCH"
            ) from error
        auto = auto_classes_of(request.nodes, precise=bool(entry.precision))
        for name in _classes(entry.device_classes, auto):
            problem = _unplaceable(entry, name, request.facts)
            if problem is None:
                items.append(_item(request, entry, name, source, samples))
            elif request.keep_going:
                skipped.append(skipped_outcome(entry.name, name, "infrastructure", [problem]))
            else:
                raise problem
    return Plan(
        items=finished.applied_to_all(items),
        skipped=tuple(skipped),
        notes=(*recipes_left_out(request), *sorted(finished.repairs)),
        lift_quarantine=finished.lifted,
        facts=request.facts,
    )


def skipped_outcome(
    model: str, device_class: str, kind: str, errors: Sequence[ColdpressError]
) -> Outcome:
    """The outcome of an item that is skipped because of errors, before its keys are known."""
    reason = "; ".join(map(str, errors))
    return Outcome(
        model=model,
        device_class=device_class,
        verdict="failed",
        failure=Failure(kind=kind, code=errors[0].code, message=reason),
        reason=reason,
        num_threads=0,
        source="",
        source_key="",
        judge_key="",
    )


def _samples(entry: Entry, digests: FileDigests) -> list[str | None]:
    """Digests of the samples and of the held-out samples; None without them."""
    held_out = entry.accuracy.samples if entry.accuracy else None
    return [digests.of(Path(path)) if path else None for path in (entry.samples, held_out)]


def _threads_of(entry: Entry, name: str, facts: ClassFacts) -> tuple[int, ...]:
    """The thread counts to judge for, the deciding one first; payloads for GPUs and portable ones
    fit any count.
    """
    if name != PORTABLE and entry.threads:
        return entry.threads
    if name != PORTABLE and device_class(name).kind == "cpu":
        return counts_within(facts.num_threads)
    return (facts.num_threads,)


def _unplaceable(entry: Entry, name: str, facts: FleetFacts) -> InfrastructureError | None:
    """The error of an entry for a class without a node, or with more threads than its smallest node
    can time.
    """
    label = f"{LABEL}{name}=true"
    problem = (
        f"no node serves {name}; nodes serve {', '.join(facts)}. Start one with `ray start"
        f" --labels={label}`, or leave the class out"
    )
    if name in facts:
        most = max(_threads_of(entry, name, facts[name]))
        num_cpus = facts[name].num_threads
        if most <= num_cpus:
            return None
        problem = (
            f"got threads {most}, but the smallest node that serves {name} has {num_cpus} CPUs;"
            f" leave the count out, or label only nodes that have as many with {label}"
        )
    return InfrastructureError(f"entry {entry.name!r}: {problem}", code="CP-NO-NODE")


def auto_classes_of(nodes: Iterable[Sequence[str]], *, precise: bool) -> list[str]:
    """The classes that `auto` means on a cluster, given the classes of each node; see
    `auto_classes`.
    """
    found = chain.from_iterable(auto_classes(classes, precise=precise) for classes in nodes)
    return list(dict.fromkeys(found))


def _classes(wanted: Sequence[str], auto: Sequence[str]) -> list[str]:
    """The classes of an entry.

    `portable` is always the last one, since it serves where the others do not.
    """
    names: dict[str, None] = {}
    for name in wanted:
        names |= dict.fromkeys(auto if name == "auto" else [name])
    names.pop(PORTABLE, None)
    return [*names, PORTABLE]


def recipes_left_out(request: PlanRequest) -> list[str]:
    """The recipes that `auto` and `all` leave out for what the workers of a CPU class lack, in a
    line for each class.
    """
    requested = sorted({recipe for entry in request.entries for recipe in entry.recipes})
    consented = {precision for entry in request.entries for precision in entry.precision}
    lines = []
    for name, facts in request.facts.items():
        if device_class(name).kind == "cpu":
            precision = consented & set(device_class(name).precisions)
            absent = left_out(requested, installed=facts.toolchain, precision=precision)
            if absent:
                lines.append(f"{name}: {absent} on its workers")
    return lines


def _item(
    request: PlanRequest,
    entry: Entry,
    name: str,
    source: Key,
    samples: Sequence[str | None],
) -> Item:
    facts, policy = request.facts[name], request.policy
    if name == PORTABLE:  # judged by drift alone
        policy = replace(policy, time_limit_s=min(policy.time_limit_s, PORTABLE_TIME_LIMIT_S))
        kept = ("error_ratio_max", "timeout_s", "memory_gb", "allow_regression")
        limits = Limits(**{name: getattr(entry.limits, name) for name in kept})
        entry = replace(entry, limits=limits, objective="p50")
    target = BuildTarget(
        device_class=name,
        threads=_threads_of(entry, name, facts),
        toolchain=facts.toolchain,
        samples=samples[0],
        held_out=samples[1],
        is_best=facts.is_best,
    )
    builds = _builds(entry, source, target)
    memory_gb = entry.limits.memory_gb
    return Item(
        entry=entry,
        device_class=name,
        threads=target.threads,
        source=source,
        builds=builds,
        judge=judge_key(entry, source, list(builds.values()), target, policy),
        policy=policy,
        optional=_optional(entry, builds),
        emulated=facts.emulated,
        memory_bytes=facts.memory_bytes if memory_gb is None else int(memory_gb * 1e9),
    )


def _builds(entry: Entry, source: Key, target: BuildTarget) -> dict[str, Key]:
    """The key of the build of each recipe.

    Raises:
        UsageError: one of a lower precision is named without consent; code CP-ACCURACY.
    """
    check_consented(entry.recipes, entry.precision)
    made_for_class = device_class(target.device_class)
    kind = made_for_class.kind
    recipes = select(
        entry.recipes,
        portable=kind == PORTABLE,
        installed=target.toolchain if kind == "cpu" else (),  # GPUs have torch alone
        precision=set(entry.precision) & set(made_for_class.precisions),
    )
    return {
        recipe.name: build_key(entry, source, made_for(recipe, kind), target) for recipe in recipes
    }


def _optional(entry: Entry, builds: Iterable[str]) -> tuple[str, ...]:
    """The recipes that only `auto` requests.

    With a limit on size or memory, or another objective, a slower one may win.
    """
    sizes = (entry.limits.size_mb_max, entry.limits.memory_mb_max)
    if "all" in entry.recipes or entry.objective != "p50" or sizes != (None, None):
        return ()
    return tuple(recipe for recipe in builds if recipe not in entry.recipes)
