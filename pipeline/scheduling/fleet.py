"""The nodes of the cluster that a campaign uses, from its start to its end.

Candidates are stored under the toolchain of their class, so a node with another toolchain is not
used for the class. How a node is checked: node_check.py; how an autoscaler is asked for nodes:
`Cluster.ask`.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from freezer.artifact import version_tuple
from freezer.errors import InfrastructureError
from freezer.hardware import AUTO_PRECISE, PORTABLE, auto_classes
from pipeline.cluster import Ask, Cluster, Node, classes_of
from pipeline.records import LABEL, ClassFacts, Event, FleetFacts
from pipeline.scheduling.node_check import NodeCheck, NodeChecks, SharedFiles
from pipeline.workspace import staging_folder

REFRESH_S = 2.0
"""Interval between two updates of the list of nodes."""

AGAIN_S = 30.0
"""Delay before a node is checked again whose check was lost, or that does not see the store yet."""

SAY_S = 60.0
"""Interval between two reports that the campaign waits for nodes."""

GONE_S = 60.0
"""How long a class may be without a node during a campaign that does not wait for nodes."""

Show = Callable[[Event], None]
"""Function that shows an event to the user."""


class Fleet:
    """The nodes that a campaign uses.

    Args:
        cluster: cluster of the nodes.
        show: takes the events.
        shared: what the nodes must see.
        wait_s: how long to wait for nodes of a class that has none; None does not wait.
        before: facts of each class when a continued campaign started. Thread counts and toolchains
            are in the keys, so both are kept while a node serves them.

    Attributes:
        blind: whether some node does not see the files of the catalog.
        patience_s: how long a class may be without a node during the campaign.
    """

    def __init__(
        self,
        cluster: Cluster,
        show: Show,
        shared: SharedFiles,
        *,
        wait_s: float | None,
        before: FleetFacts | None = None,
    ) -> None:
        self.cluster = cluster
        self.wait_s = wait_s if cluster.joined else None
        self.patience_s = GONE_S if self.wait_s is None else self.wait_s
        self._show = show
        self._before = before or {}
        self._shared = shared
        self._checks = NodeChecks(cluster, self._note, shared)
        self.blind = False
        self._used: dict[str, Node] = {}
        self._refused: dict[str, tuple[float, str]] = {}
        self._facts: dict[str, ClassFacts] = {}
        self._next = 0.0

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Nodes that may get tasks now. Thread-safe."""
        return (*self._used.values(),)

    @property
    def classes(self) -> tuple[str, ...]:
        """Every class that a node serves."""
        return classes_of(self.nodes)

    def facts(self) -> FleetFacts:
        """Return, for each class, its toolchain, the largest memory of an item, whether it is the
        best one of a node, whether all its nodes are emulated, and the thread count: the cores of
        its smallest node, or the count of a continued campaign.
        """
        best = {name for node in self.nodes for name in node.classes if name not in node.lesser}
        real = classes_of([node for node in self.nodes if not node.emulated])
        return {
            name: replace(
                self._facts[name],
                num_threads=self._num_threads(name),
                is_best=name in best,
                emulated=name not in real,
            )
            for name in self.classes
        }

    @contextmanager
    def assembled(self, requested: Collection[str]) -> Iterator[None]:
        """Find and check the nodes, and check those that join inside the block.

        Args:
            requested: classes of the catalog, also `auto`. The campaign waits for those that are
                requested by name.

        Raises:
            InfrastructureError: there is no node, none has a label, one does not see the store,
                none can build, or the only one of a class is in use by others.
        """
        wanted = set(requested) - {"auto", AUTO_PRECISE}
        precise = AUTO_PRECISE in requested
        with staging_folder(self._shared.store) as self._checks.mark:
            nodes = self._waited_for(wanted)
            wanted.add(PORTABLE)
            if precise or "auto" in requested:
                wanted.update(*(auto_classes(node.classes, precise=precise) for node in nodes))
            for node in nodes:
                self._start_check(node, wanted)
            self._checks.wait(self.wait_s or 0)
            self._begin(self._checks.take_complete())
            yield

    def _begin(self, checks: Sequence[NodeCheck]) -> None:
        """Choose the toolchains, and use the nodes that have them."""
        for check in checks:
            inspected = check.end_on_cpu.value
            if inspected is not None and inspected.problem:
                raise InfrastructureError(
                    f"{check.node} cannot use the store: {inspected.problem}; put it on storage"
                    " that all nodes mount at the same path, or in a bucket that they can reach",
                    code="CP-STORE-UNSHARED",
                )
        for name in classes_of([check.node for check in checks]):
            preferred = checks
            if name == PORTABLE:
                preferred = [check for check in checks if check.node.is_like_the_driver] or checks
            facts = [check.facts(name) for check in preferred]
            self._choose_facts(name, [known for known in facts if known is not None])
        for check in checks:
            self._admit(check)
        if not self._used:
            if all(check.end_on_cpu.lost for check in checks):
                raise InfrastructureError(
                    "Ray lost all nodes while they were checked; start the cluster, then run the"
                    " same command again",
                    code="CP-RAY",
                )
            raise InfrastructureError("no node can build; the notes above say why")

    def tick(self) -> None:
        """Use nodes that joined, and drop nodes that left. Cheap to call often."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REFRESH_S
            self._refresh()
        self._checks.collect()
        for check in self._checks.take_complete():
            self._admit(check)

    def refresh_soon(self) -> None:
        """Update the nodes in the next tick, since one of them lost a task."""
        self._next = 0.0

    def ask(self, wanted: Mapping[Ask, int]) -> None:
        """Ask an autoscaler for nodes, if the campaign waits for nodes; see `Cluster.ask`."""
        if self.wait_s is not None:
            self.cluster.ask(wanted)

    def _waited_for(self, wanted: Collection[str]) -> list[Node]:
        """Return the nodes once every wanted class has one, or when the wait is over; the plan
        rejects classes without a node.
        """
        deadline = time.monotonic() + (self.wait_s or 0)
        next_note = 0.0
        while True:
            nodes = self.cluster.nodes()
            problem = _problem(nodes)
            served = classes_of(nodes)
            missing = [name for name in wanted if name not in served]
            left_s = deadline - time.monotonic()
            if left_s <= 0 and problem:
                raise problem
            if left_s <= 0 or not (problem or missing):
                return nodes
            if time.monotonic() >= next_note:
                next_note = time.monotonic() + SAY_S
                labels = " and ".join(f"{LABEL}{name}=true" for name in missing)
                self._note(
                    f"waiting up to {left_s:.0f} s for nodes labelled {labels or LABEL}; nodes"
                    f" serve {', '.join(served) or 'none'}"
                )
            self.ask({Ask(device_class=name): 1 for name in missing or [PORTABLE]})
            time.sleep(1)

    def _start_check(self, node: Node, wanted: Collection[str]) -> None:
        """Check a node for those of the wanted classes that it serves."""
        classes = tuple(name for name in node.classes if name in wanted)
        self._checks.start(replace(node, classes=classes))

    def _refresh(self) -> None:
        alive = {node.node_id: node for node in self.cluster.nodes()}
        for node_id in self._used.keys() - alive.keys():
            node = self._used.pop(node_id)
            self._note(f"{node} left; it served {', '.join(node.classes)}")
        checked = self._checks.under_way
        for node_id in checked.keys() - alive.keys():
            del checked[node_id]
        for node_id, node in alive.items():
            again, _ = self._refused.get(node_id, (0, ""))
            is_known = node_id in self._used or node_id in checked
            if not is_known and time.monotonic() >= again:
                self._start_check(node, self._facts)

    def _num_threads(self, name: str) -> int:
        counts = [node.num_cpus for node in self._used.values() if name in node.classes]
        before = self._before.get(name)
        if before is not None and before.num_threads <= max(counts):
            return before.num_threads
        return min(counts)

    def _choose_facts(self, name: str, facts: Sequence[ClassFacts]) -> None:
        """Choose the toolchain and memory of a class.

        The toolchain is that of the continued campaign if a node has it, else the most common one.
        Of several, it is the one with the older torch: newer ones open what that makes.
        """
        if not facts:
            return
        counts = Counter(_text(known) for known in facts)
        before = self._before.get(name)

        def rank(known: ClassFacts) -> tuple[bool, int, tuple[int, ...], str]:
            text = _text(known)
            is_another = before is not None and text != _text(before)
            return is_another, -counts[text], version_tuple(known.toolchain["torch"]), text

        self._facts[name] = ClassFacts(
            num_threads=0,
            toolchain=min(facts, key=rank).toolchain,
            memory_bytes=max(known.memory_bytes or 0 for known in facts) or None,
        )

    def _admit(self, check: NodeCheck) -> None:
        """Use a checked node for the classes that it fits, or report why not."""
        node, done = check.node, check.end_on_cpu
        failure = done.failure or done.value.problem
        if failure:
            reason = f"{failure}; checked again every {AGAIN_S:g} s"
            self._refuse(node, reason, time.monotonic() + AGAIN_S)
            return
        classes = []
        for name in node.classes:
            problem = self._misfit(check, name)
            if problem is None:
                classes.append(name)
            else:
                self._note(f"{node} is not used for {name}: {problem}")
        if not classes:
            self._refuse(node, "its toolchain differs from the other nodes", math.inf)
            return
        if self.cluster.joined and not done.value.sees_files:
            self.blind = True
        self._used[node.node_id] = replace(node, classes=tuple(classes))
        if self._next:
            self._note(f"{node} joined, for {', '.join(classes)}")

    def _refuse(
        self,
        node: Node,
        reason: str,
        until: float,
    ) -> None:
        """Do not use or check a node until a time; report the reason, once."""
        _, before = self._refused.get(node.node_id, (0, ""))
        if reason != before:
            self._note(f"{node} is not used: {reason}")
        self._refused[node.node_id] = until, reason

    def _misfit(self, check: NodeCheck, name: str) -> str | None:
        """Return why a node is not used for a class; None if it has its toolchain."""
        done = check.done(name)
        if done is None:
            return "Ray has no GPU there; start it with --num-gpus"
        if done.failure is not None:
            return done.failure
        used = self._facts[name].toolchain
        toolchain = done.value.facts.toolchain
        differences = [
            f"{part} {toolchain.get(part)} instead of {used.get(part)}"
            for part in {**used, **toolchain}
            if toolchain.get(part) != used.get(part)
        ]
        return f"its toolchain differs: {', '.join(differences)}" if differences else None

    def _note(self, text: str) -> None:
        self._show(Event(kind="note", text=text))


def _text(facts: ClassFacts) -> str:
    """Return a toolchain in one line, independent of the order of its parts."""
    return json.dumps(facts.toolchain, sort_keys=True)


def _problem(nodes: Collection[Node]) -> InfrastructureError | None:
    """Return why nothing can run on these nodes."""
    remedy = "start workers with the options that `coldpress worker-labels` prints"
    if not nodes:
        return InfrastructureError(f"the cluster has no node with a CPU; {remedy}", code="CP-RAY")
    if any(node.labelled for node in nodes):
        return None
    return InfrastructureError(
        f"no node of the cluster carries a label {LABEL}<device class>; {remedy}", code="CP-NO-NODE"
    )
