"""`portable` is the fallback of all machines, so a node of each other architecture checks its
golden outputs before it is published. A node that fails to check it decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from freezer.artifact import UNMEASURED
from freezer.hardware import PORTABLE
from pipeline.cluster import Done, Handle
from pipeline.planning import Item
from pipeline.records import Event, Outcome
from pipeline.scheduling.fleet import Fleet, Show
from pipeline.scheduling.outcomes import folder_name
from pipeline.worker import check_portable


@dataclass(kw_only=True)
class _Check:
    """An outcome of `portable`, and the architectures whose checks have not ended, by task."""

    item: Item
    outcome: Outcome
    machines: dict[Handle, str] = field(default_factory=dict)


class PortableChecks:
    """The outcomes of `portable` that wait for other architectures.

    Args:
        fleet: nodes to check on.
        store: URI of the store.
        show: takes the events.
    """

    def __init__(
        self,
        fleet: Fleet,
        store: str,
        show: Show,
    ) -> None:
        self._fleet = fleet
        self._store = store
        self._show = show
        self._running: dict[Handle, _Check] = {}

    @property
    def handles(self) -> Collection[Handle]:
        """The tasks that run."""
        return self._running.keys()

    def start(self, item: Item, outcome: Outcome) -> bool:
        """Start the checks of a new outcome; return whether it has to wait for any."""
        if item.device_class != PORTABLE or outcome.verdict != "published" or outcome.cached:
            return False
        own = outcome.host.get("machine", "")
        real_last = sorted(self._fleet.nodes, key=lambda node: not node.emulated)
        nodes = {node.machine: node for node in real_last if node.machine not in ("", own)}
        check = _Check(item=item, outcome=outcome)
        for machine, node in nodes.items():
            handle = self._fleet.cluster.start(
                check_portable,
                self._store,
                folder_name(outcome),
                item.entry.limits,
                name=f"check {item.label()} on {machine}",
                class_name=PORTABLE,
                node=node,
                num_cpus=0,
            )
            check.machines[handle] = machine
            self._running[handle] = check
        return bool(check.machines)

    def end(self, done: Done) -> list[tuple[Item, Outcome]]:
        """A check ended; return its outcome if it was the last one."""
        check = self._running.pop(done.handle)
        machine = check.machines.pop(done.handle)
        problem, differs = (done.failure, False) if done.failure else done.value
        host = check.outcome.host
        if differs:
            reason = f"on {machine}: {problem}"
            check.outcome = replace(
                check.outcome, verdict="rejected", reason=reason, recipe=None, figures=UNMEASURED
            )
        elif problem:
            text = f"{check.item.label()}: not checked on {machine}: {problem}"
            self._show(Event(kind="note", text=text))
        else:
            others = (*host.get("others", ()), machine)
            check.outcome = replace(check.outcome, host={**host, "others": others})
        return [] if check.machines else [(check.item, check.outcome)]
