"""Facts of device classes for a plan without Ray."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from freezer.hardware import PORTABLE, auto_classes, available_cpus, detect
from pipeline.catalog import Entry
from pipeline.records import ClassFacts
from pipeline.scheduling.queue import takes_gpu
from pipeline.worker import probe


def facts_here(
    entries: Sequence[Entry],
    requested: Collection[str],
    before: Mapping[str, ClassFacts],
    note: Callable[[str], None],
) -> dict[str, ClassFacts]:
    """Return the facts of the requested classes, as a local Ray would find them.

    Args:
        entries: entries of the catalog.
        requested: classes of the catalog, also `auto`.
        before: facts of the campaign that this start continues, also for classes that this machine
            does not serve.
        note: takes lines for the user.
    """
    served = detect().classes
    num_cpus = available_cpus()
    wanted = {PORTABLE, *requested} - {"auto"}
    if "auto" in requested:
        wanted.update(auto_classes(served))
    on_cpu = probe(next(name for name in served if not takes_gpu(name)), num_cpus)
    facts: dict[str, ClassFacts] = {}
    for name in sorted(wanted):
        known = before.get(name)
        if name in served:
            facts[name] = probe(name, num_cpus) if takes_gpu(name) else on_cpu
            if known is not None and known.num_threads <= num_cpus:
                facts[name] = replace(facts[name], num_threads=known.num_threads)
        elif known is not None:
            facts[name] = known
        else:
            counts = [count for entry in entries for count in entry.threads]
            facts[name] = replace(on_cpu, num_threads=max([num_cpus, *counts]))
            note(
                f"{name}: this machine does not serve it; --address plans it for the workers of a"
                " cluster"
            )
    return facts
