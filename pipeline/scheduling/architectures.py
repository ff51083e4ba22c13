"""`portable` is the fallback of all machines, so a node of each other architecture checks its
golden outputs before it is published. A node that fails to check it decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from freezer.artifact import UNMEASURED
from freezer.hardware import PORTABLE
from pipeline.cluster import Done, Handle, Node
from pipeline.planning import Item
from pipeline.records import Event, Outcome
from pipeline.scheduling.fleet import Fleet, Show
from pipeline.scheduling.outcomes import Decided, folder_name
from pipeline.worker import check_portable


class PortableChecks:
    """The outcomes of `portable` that wait for other architectures, one after the other.

    Args:
        fleet: nodes to check on.
        store: URI of the store.
        show: takes the events.
    """

    def __init__(self, fleet: Fleet, store: str, show: Show) -> None:
        self._fleet = fleet
        self._store = store
        self._show = show
        # With the node that checks, and those that follow.
        self._running: dict[Handle, tuple[Item, Outcome, Sequence[Node]]] = {}

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
        return self._check(item, outcome, [*nodes.values()])

    def _check(self, item: Item, outcome: Outcome, nodes: Sequence[Node]) -> bool:
        """Start the check on the first of some nodes; return whether there is one."""
        if not nodes:
            return False
        handle = self._fleet.cluster.start(
            check_portable,
            self._store,
            folder_name(outcome),
            item.entry.limits,
            name=f"check {item.label()} on {nodes[0].machine}",
            class_name=PORTABLE,
            node=nodes[0],
            num_cpus=0,
        )
        self._running[handle] = item, outcome, nodes
        return True

    def end(self, done: Done) -> list[Decided]:
        """A check ended; return its outcome if it was the last one."""
        item, outcome, (node, *others) = self._running.pop(done.handle)
        problem, differs = (done.failure, False) if done.failure else done.value
        if differs:
            rejected = replace(
                outcome,
                verdict="rejected",
                reason=f"on {node.machine}: {problem}",
                recipe=None,
                figures=UNMEASURED,
            )
            return [(item, rejected)]
        if problem:
            self._show(
                Event(kind="note", text=f"{item.label()}: not checked on {node.machine}: {problem}")
            )
        else:
            checked = (*outcome.host.get("others", ()), node.machine)
            outcome = replace(outcome, host={**outcome.host, "others": checked})
        return [] if self._check(item, outcome, others) else [(item, outcome)]
