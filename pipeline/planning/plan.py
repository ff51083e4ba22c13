"""Plan: which builds and judges a campaign needs, and which earlier campaigns finished.

Loads no model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from freezer.errors import (
    CatalogError,
    InfrastructureError,
    IntegrityError,
    NotPublishedError,
    StoreUnreachableError,
)
from freezer.freezing.recipes import left_out, made_for, select
from freezer.hardware import PORTABLE, auto_classes, counts_within, device_class
from freezer.spec import Limits, SamplingPolicy
from freezer.store import Store
from pipeline.catalog import Entry
from pipeline.failures import LIFT, MOST_STARTS, decide, is_kept, is_missed
from pipeline.ledger import Ledger, LedgerRow
from pipeline.planning.keys import (
    BuildTarget,
    FileDigests,
    Key,
    build_key,
    differing,
    judge_key,
    source_key,
)
from pipeline.records import LABEL, ClassFacts, FinishedBuild, Outcome

PORTABLE_TIME_LIMIT_S = 4.0
"""Sampling time of a portable artifact, whose speed is reported and decides nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One model for one device class.

    Attributes:
        num_threads: the deciding thread count; `further_threads` are the others.
        builds: the key of the build of each recipe.
        judge: the key of its judge.
        finished: its outcome, if an earlier campaign reached it.
        why: how it differs from the nearest finished outcome, for `--explain`.
        before: the outcome to keep unless a recipe of `missed` is built now.
        missed: recipes that circumstances kept from being built for `before`.
        optional: recipes that were not requested by name, and may be skipped.
        memory_bytes: memory that its builds and its judge may use; None if unknown.
    """

    entry: Entry
    device_class: str
    num_threads: int
    source: Key
    builds: Mapping[str, Key]
    judge: Key
    policy: SamplingPolicy
    finished: Outcome | None = None
    why: str = ""
    further_threads: tuple[int, ...] = ()
    memory_bytes: int | None = None
    before: Outcome | None = None
    missed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    @property
    def parts(self) -> dict[str, Any]:
        """The parts of its keys, for a later `--explain`."""
        builds = {name: key.parts for name, key in self.builds.items()}
        return {"source": self.source.parts, "judge": self.judge.parts, "builds": builds}

    def label(self, recipe: str | None = None) -> str:
        """`model class`, or `model class recipe`, for people."""
        return " ".join(word for word in (self.entry.name, self.device_class, recipe) if word)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unplaced:
    """A model for a class without a node, or without a node that has enough threads."""

    model: str
    device_class: str
    problem: InfrastructureError


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All items of a campaign, in the order of the catalog; the classes of a model are adjacent.

    Attributes:
        unplaced: models and classes that --keep-going skips because no node serves them.
        problems: entries that --keep-going skips because a file became unreadable.
        lift_quarantine: whether items that crashed in earlier campaigns are retried.
        facts: thread count and toolchain of each class.
    """

    items: tuple[Item, ...]
    unplaced: tuple[Unplaced, ...] = ()
    problems: tuple[CatalogError, ...] = ()
    lift_quarantine: bool = False
    facts: Mapping[str, ClassFacts] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What to plan.

    Attributes:
        entries: of the catalog.
        facts: thread count and toolchain of each class that a node serves.
        auto: the classes that `auto` means on this cluster.
        device_classes, recipes: replace those of the entries; empty keeps theirs.
        policy: of sampling.
        keep_going: skip entries whose files became unreadable, and classes without a node or
            without enough threads.
        allow_regression: publish what is slower, or drifts more, than the artifact that serves now.
    """

    entries: Sequence[Entry]
    facts: Mapping[str, ClassFacts]
    auto: Sequence[str]
    device_classes: Sequence[str] = ()
    recipes: Sequence[str] = ()
    policy: SamplingPolicy
    keep_going: bool = False
    allow_regression: bool = False


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
            lacking = _unplaceable(entry, name, request.facts)
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
    field = (
        "samples"
        if entry.samples is not None and error.filename == str(entry.samples)
        else "source"
    )
    message = (
        f"{type(error).__name__}: {error}; the file changed while the campaign started; put it"
        " back, and start again"
    )
    return CatalogError(message, entry=entry.name, field=field, code="CP-FETCH")


def _threads_of(entry: Entry, name: str, facts: ClassFacts) -> tuple[int, ...]:
    """The thread counts to judge for, the deciding one first; payloads for GPUs and portable ones
    fit any count.
    """
    if name == PORTABLE:
        return (facts.num_threads,)
    own = (
        counts_within(facts.num_threads)
        if device_class(name).kind == "cpu"
        else (facts.num_threads,)
    )
    return entry.threads or own


def _unplaceable(
    entry: Entry, name: str, facts: Mapping[str, ClassFacts]
) -> InfrastructureError | None:
    """The error of an entry for a class without a node, or with more threads than its smallest node
    can time.
    """
    if name not in facts:
        problem = (
            f"no node serves {name}; nodes serve {', '.join(facts)}. Start one with `ray start"
            f" --labels={LABEL}{name}=true`, or leave the class out"
        )
    elif (most := max(_threads_of(entry, name, facts[name]))) > facts[name].num_threads:
        problem = (
            f"got threads {most}, but the smallest node that serves {name} has"
            f" {facts[name].num_threads} CPUs; leave the count out, or label only nodes that have"
            f" as many with {LABEL}{name}=true"
        )
    else:
        return None
    return InfrastructureError(f"entry {entry.name!r}: {problem}", code="CP-NO-NODE")


def auto_classes_of(nodes: Sequence[Sequence[str]]) -> list[str]:
    """The classes that `auto` means on a cluster, given the classes of each node."""
    return list(dict.fromkeys(name for classes in nodes for name in auto_classes(classes)))


def _classes(wanted: Sequence[str], auto: Sequence[str]) -> list[str]:
    """The classes of an entry.

    `portable` is always the last one, since it serves where the others do not.
    """
    found = dict.fromkeys(
        resolved for name in wanted for resolved in (auto if name == "auto" else [name])
    )
    return [*(name for name in found if name != PORTABLE), PORTABLE]


def _packages(name: str, facts: ClassFacts) -> Collection[str]:
    """What builds for a class may use besides torch; GPUs have torch alone."""
    return facts.toolchain if device_class(name).kind == "cpu" else ()


def recipes_left_out(request: PlanRequest) -> list[str]:
    """The recipes that `auto` and `all` leave out for what the workers of a CPU class lack, in a
    line for each class.
    """
    lines = []
    for name, facts in request.facts.items():
        if device_class(name).kind == "cpu":
            names = {
                recipe for entry in request.entries for recipe in request.recipes or entry.recipes
            }
            if text := left_out(sorted(names), installed=_packages(name, facts)):
                lines.append(f"{name}: {text} on its workers")
    return lines


def _item(request: PlanRequest, entry: Entry, name: str, source: Key, samples: str | None) -> Item:
    facts, policy = request.facts[name], request.policy
    if name == PORTABLE:  # judged by drift alone
        policy = replace(policy, time_limit_s=min(policy.time_limit_s, PORTABLE_TIME_LIMIT_S))
        own = entry.limits
        limits = Limits(
            error_ratio_max=own.error_ratio_max, timeout_s=own.timeout_s, memory_gb=own.memory_gb
        )
        entry = replace(entry, limits=limits, objective="p50")
    entry = replace(entry, limits=replace(entry.limits, allow_regression=request.allow_regression))
    num_threads, *further = _threads_of(entry, name, facts)
    target = BuildTarget(
        device_class=name,
        num_threads=num_threads,
        further_threads=tuple(further),
        toolchain=facts.toolchain,
        samples=samples,
    )
    requested = request.recipes or entry.recipes
    kind = device_class(name).kind
    recipes = select(requested, portable=name == PORTABLE, installed=_packages(name, facts))
    builds = {
        recipe.name: build_key(entry, source, made_for(recipe, kind), target) for recipe in recipes
    }
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
        optional=_optional(requested, builds, entry),
        memory_bytes=facts.memory_bytes if memory_gb is None else int(memory_gb * 1e9),
    )


def _optional(requested: Collection[str], builds: Iterable[str], entry: Entry) -> tuple[str, ...]:
    """The recipes that only `auto` requests.

    With a limit on size or memory, or another objective, a slower one may win.
    """
    limits = entry.limits
    if (
        "all" in requested
        or entry.objective != "p50"
        or limits.size_mb_max is not None
        or limits.memory_mb_max is not None
    ):
        return ()
    return tuple(recipe for recipe in builds if recipe not in requested)


_RETRIED = {
    "quarantine": f"retrying because {LIFT} was given",
    "memory": "and may use more memory now",
}

_DIGESTS = re.compile(r"judge\.builds|builds\..*\.source")
"""Parts of keys that are keys themselves, whose parts are compared."""


class FinishedWork:
    """Outcomes of earlier campaigns, in a ledger and a store that stay as they are while this
    object is used.

    Args:
        store, ledger: of the campaign.
        lifted: whether quarantined failures are retried.
        since: start of the campaign that is continued: its own outcomes since then count before
            later ones of other campaigns.
    """

    def __init__(
        self, store: Store, ledger: Ledger, *, lifted: bool = False, since: float = math.inf
    ) -> None:
        self._ledger, self.lifted, self._since = ledger, lifted, since
        self._store, self._versions = store, cache(store.versions)

    def applied_to(self, item: Item) -> Item:
        """Return a planned item with its finished outcome, or what was missed in it, and why."""
        known, why = self._find(item)
        if known is None:
            return replace(item, why=why)
        finished = replace(
            known, tags=dict(item.entry.tags), registered_name=item.entry.registered_name
        )
        missed, why = self._find_missed(item, finished)
        if missed:
            return replace(item, why=why, before=finished, missed=missed)
        return replace(item, why=why, finished=finished)

    def found_meanwhile(self, item: Item) -> Outcome | None:
        """Return the outcome that another campaign reached since an item was planned; None if it
        used fewer builds, or none did.
        """
        if item.before is not None:
            return None
        with suppress(StoreUnreachableError):  # the work is then done twice
            self._ledger.refresh()
        return self.applied_to(item).finished

    def _find(self, item: Item) -> tuple[Outcome | None, str]:
        """Return the finished outcome of an item if it still holds, and why or why not in
        one line.
        """
        own = self._ledger.own("outcome", item.judge.digest, item.entry.name)
        if own is not None and own.time >= self._since:
            found, why = self._check(item, own)
            if found is not None:
                return found, why
        row = self._ledger.find("outcome", item.judge.digest, model=item.entry.name)
        if row is not None:
            return self._check(item, row)
        return None, _why_new(
            item, self._ledger.nearest("outcome", item.entry.name, item.device_class)
        )

    def _check(self, item: Item, row: LedgerRow) -> tuple[Outcome | None, str]:
        """Return the outcome of a row if it still holds, and why or why not in one line."""
        outcome = Outcome.from_json(row.data["outcome"])
        failure = outcome.failure
        if outcome.verdict == "unstable":
            return None, "was unstable (disturbed), which is never kept"
        if (
            outcome.clock == "disturbed"
            and not item.policy.accept_noise
            and item.device_class != PORTABLE
        ):
            return None, "was measured on a busy machine with --accept-noise"
        if failure is not None and not is_kept(
            failure, memory_bytes=item.memory_bytes, lifted=self.lifted
        ):
            why = _RETRIED.get(decide(failure.kind, failure.code).kept, "which is never kept")
            return None, f"failed earlier ({failure.kind}), {why}"
        if outcome.verdict == "kept-previous":
            if item.entry.limits.allow_regression:
                return None, "was kept-previous; judging again because --allow-regression was given"
            if outcome.previous is None or outcome.previous.artifact != self._serving(
                row.model, item.device_class
            ):
                return None, "was kept-previous, and another artifact serves now"
        if outcome.version is not None and outcome.version not in self._versions(row.model):
            return None, f"version {outcome.version} is gone from the store"
        return outcome.as_cached(), "unchanged"

    def _serving(self, model: str, device_class: str) -> str | None:
        """Return the digest of the image of the artifact that serves a class; None without one that
        can be read.
        """
        with suppress(NotPublishedError, IntegrityError):
            image = self._store.version(model).images.get(device_class)
            return image.digest if image else None
        return None

    def _find_missed(self, item: Item, outcome: Outcome) -> tuple[tuple[str, ...], str]:
        """Return the recipes that an outcome lacks and that are to be built now, and a line that
        reports them.
        """
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
            elif is_missed(
                failure, num_starts=starts, memory_bytes=item.memory_bytes, lifted=self.lifted
            ):
                again.append(recipe)
                words.append(
                    f"{recipe} failed ({failure.kind}); retrying, start {starts + 1} of"
                    f" {max(MOST_STARTS, starts + 1)}"
                )
            elif decide(failure.kind, failure.code).kept == "never":
                words.append(
                    f"{recipe} failed ({failure.kind}) in {starts} starts; retried only with {LIFT}"
                )
        return tuple(again), "; ".join(words) or "unchanged"


def _why_new(item: Item, nearest: LedgerRow | None) -> str:
    """Return how an item differs from the nearest finished one."""
    if nearest is None:
        return "never done"
    names = [
        name
        for name in differing(item.parts, nearest.data.get("parts", {}))
        if not _DIGESTS.fullmatch(name)
    ]
    words = [name.removeprefix("judge.").removeprefix("builds.") for name in names]
    return f"differs from the nearest finished in {', '.join(words) or 'nothing that is recorded'}"
