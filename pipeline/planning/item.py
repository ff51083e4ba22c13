"""What a plan consists of: items, unplaced items and the plan itself."""

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

    def label(self, recipe: str | None = None) -> str:
        """`model class`, or `model class recipe`, for people."""
        return " ".join(word for word in (self.entry.name, self.device_class, recipe) if word)


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
