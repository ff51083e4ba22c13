"""Plans and their items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from freezer.errors import CatalogError, InfrastructureError
from freezer.limits import SamplingPolicy
from pipeline.catalog.entry import Entry
from pipeline.planning.keys import Key
from pipeline.records.class_facts import ClassFacts
from pipeline.records.outcome import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One model for one device class.

    Attributes:
        num_threads: the deciding thread count; `further_threads` are the others.
        builds: the key of the build of each recipe.
        judge: the key of its judge.
        finished: its outcome, if an earlier campaign reached it.
        is_kept: whether the ledger has that outcome with the tags and registered name of the entry.
        why: how it differs from the nearest finished outcome, for `--explain`.
        before: the outcome to keep unless a recipe of `missed` is built now.
        missed: recipes that circumstances kept from being built for `before`.
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
    is_kept: bool = False
    before: Outcome | None = None
    missed: tuple[str, ...] = ()

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
