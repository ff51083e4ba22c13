"""Facts of device classes for a plan without Ray: of this machine, or as earlier campaigns recorded
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from freezer.hardware import PORTABLE, auto_classes, available_cpus, detect
from freezer.store import Store
from pipeline.catalog import Entry
from pipeline.ledger import CampaignRecord, RowKind, ledger_folder, read_rows
from pipeline.records import ClassFacts
from pipeline.scheduling.queue import takes_gpu
from pipeline.worker import probe

_CAMPAIGN: RowKind = "campaign"


def facts_here(
    entries: Sequence[Entry],
    requested: set[str],
    store: Store,
    before: Mapping[str, ClassFacts],
    note: Callable[[str], None],
) -> dict[str, ClassFacts]:
    """Return the facts of the requested classes.

    A local Ray would use this machine's. A class that this machine does not serve has those of the
    newest campaign that used it.

    Args:
        entries: of the catalog.
        requested: classes of the catalog, also `auto`.
        store: its ledger has the earlier campaigns.
        before: facts of the campaign that this start continues.
        note: takes lines for the user.
    """
    served, num_cpus = detect().classes, available_cpus()
    wanted = (
        requested - {"auto"}
        | {PORTABLE}
        | (set(auto_classes(served)) if "auto" in requested else set())
    )
    on_cpu = probe(next(name for name in served if not takes_gpu(name)), num_cpus)
    found: dict[str, ClassFacts] = {}
    recorded = _recorded(store) if wanted - set(served) else {}
    for name in sorted(wanted):
        if name in served:
            known = before[name].num_threads if name in before else num_cpus
            facts = probe(name, num_cpus) if takes_gpu(name) else on_cpu
            found[name] = replace(facts, num_threads=known if known <= num_cpus else num_cpus)
        elif name in recorded:
            campaign, found[name] = recorded[name]
            note(
                f"{name}: planned for the workers of campaign {campaign}, since this machine does"
                " not serve it"
            )
        else:
            most = max((num_cpus, *(count for entry in entries for count in entry.threads)))
            found[name] = replace(on_cpu, num_threads=most)
            note(
                f"{name}: no campaign has used a worker of this class, and this machine does not"
                " serve it"
            )
    return found


def _recorded(store: Store) -> dict[str, tuple[str, ClassFacts]]:
    """Return the facts of each class, with the newest campaign that used it."""
    rows = sorted(read_rows(ledger_folder(store), kinds=(_CAMPAIGN,)), key=lambda row: row.time)
    return {
        name: (row.campaign, facts)
        for row in rows
        for name, facts in CampaignRecord.from_json(row.data).facts.items()
    }
