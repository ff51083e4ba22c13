"""The nodes of the cluster that a campaign uses, from its start to its end.

Candidates are stored under the toolchain of their class, so a node with another toolchain is not
used for the class. How a node is
checked: node_check.py; how an autoscaler is asked for nodes: `Cluster.ask`.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from freezer.artifact import version_tuple
from freezer.errors import InfrastructureError
from freezer.hardware import PORTABLE, auto_classes, detect
from pipeline.cluster import Ask, Cluster, Handle, Node, classes_of
from pipeline.records import LABEL, ClassFacts, Event
from pipeline.scheduling.node_check import NodeCheck, NodeChecks

REFRESH_S = 2.0
"""Interval between two updates of the list of nodes."""

AGAIN_S = 30.0
"""Delay before a node is checked again whose check was lost, or that does not see the store yet."""

SAY_S = 60.0
"""Interval between two reports that the campaign waits for nodes."""

GONE_S = 60.0
"""How long a class may be without a node during a campaign that does not wait for nodes."""

WAIT_S = 1800.0
"""Default of `--wait-for-nodes`."""


class Fleet:
    """The nodes that a campaign uses.

    Args:
        cluster: of the nodes.
        show: takes the events.
        store: folder of the store that all nodes must see; a file is written there.
        files: of the catalog; if a node does not see them, sources are shipped through the store.
        wait_s: how long to wait for nodes of a class that has none; None does not wait.
        bucket_uri: URI of a store in a bucket, which all nodes must reach instead of seeing a
            folder.
        before: facts of each class when a continued campaign started. Thread counts and toolchains
            are in the keys, so both are kept while a node serves them.

    Attributes:
        blind: whether some node does not see the files of the catalog.
    """

    def __init__(
        self,
        cluster: Cluster,
        show: Callable[[Event], None],
        *,
        store: Path,
        files: Path,
        wait_s: float | None,
        bucket_uri: str | None = None,
        before: Mapping[str, ClassFacts] | None = None,
    ) -> None:
        self.cluster, self.wait_s = cluster, wait_s if cluster.joined else None
        self._show, self._before = show, before or {}
        self._checks = NodeChecks(
            cluster, self._note, store=store, files=files, bucket_uri=bucket_uri
        )
        self.blind = False
        self._used: dict[str, Node] = {}
        self._refused: dict[str, tuple[float, str]] = {}
        self._doubted: dict[str, Handle] = {}
        self._facts: dict[str, ClassFacts] = {}
        self._next = 0.0

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Nodes that may get tasks now. Thread-safe."""
        return tuple(node for name, node in list(self._used.items()) if name not in self._doubted)

    @property
    def classes(self) -> tuple[str, ...]:
        """Every class that a node serves."""
        return classes_of(self.nodes)

    @property
    def patience_s(self) -> float:
        """How long a class may be without a node during the campaign, in seconds."""
        return GONE_S if self.wait_s is None else self.wait_s

    def facts(self) -> Mapping[str, ClassFacts]:
        """Return, for each class, its toolchain, the largest memory of an item, and the thread
        count: the cores of its smallest node, or the count of a continued campaign.
        """
        return {
            name: replace(self._facts[name], num_threads=self._num_threads(name))
            for name in classes_of(self._used.values())
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
        named = set(requested) - {"auto"}
        with self._checks.marked():
            nodes = self._waited_for(named)
            auto = (
                {name for node in nodes for name in auto_classes(node.classes)}
                if "auto" in requested
                else set()
            )
            for node in nodes:
                self._start_check(node, named | auto | {PORTABLE})
            self._checks.wait(self.wait_s or 0)
            checks = self._checks.take_complete()
            self._check_store(checks)
            self._settle(checks)
            for check in checks:
                self._admit(check)
            if not self._used:
                why = next(
                    (
                        done.failure
                        for check in checks
                        for done in check.found.values()
                        if done.failure is not None
                    ),
                    "",
                )
                raise InfrastructureError(f"no node can build; the first one reports: {why}")
            yield

    def tick(self) -> None:
        """Use nodes that joined, drop nodes that left, and take answers of doubtful ones.

        Cheap to call often.
        """
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REFRESH_S
            self._refresh()
        self._take_answers()
        self._checks.collect()
        for check in self._checks.take_complete():
            self._admit(check)

    def doubt(self, node: Node) -> None:
        """Give no more tasks to a node that lost one until it answers."""
        if node.node_id in self._used and node.node_id not in self._doubted:
            self._doubted[node.node_id] = self.cluster.glance(
                _answer, name="answer", device_class_=node.classes[0], node=node
            )

    def ask(self, wanted: Mapping[Ask, int]) -> None:
        """Ask an autoscaler for nodes, if the campaign waits for nodes; see `Cluster.ask`."""
        if self.wait_s is not None:
            self.cluster.ask(wanted)

    def _waited_for(self, wanted: Collection[str]) -> list[Node]:
        """Return the nodes once every wanted class has one, or when the wait is over; the plan
        rejects classes without a node.
        """
        deadline = time.monotonic() + (self.wait_s or 0)
        said = 0.0
        while True:
            nodes = self.cluster.nodes()
            problem = _problem(nodes)
            lacking = [name for name in wanted if name not in classes_of(nodes)]
            if not problem and (not lacking or self.wait_s is None):
                break
            if time.monotonic() >= deadline:
                if problem:
                    raise problem
                self._note(f"no node for {', '.join(lacking)} after {self.wait_s:g} s")
                break
            if time.monotonic() >= said:
                said = time.monotonic() + SAY_S
                labels = (
                    " and ".join(f"{LABEL}{name}=true" for name in lacking)
                    or f"{LABEL}<device class>=true"
                )
                left = deadline - time.monotonic()
                self._note(
                    f"waiting up to {left:.0f} s for nodes labelled {labels}; nodes serve"
                    f" {', '.join(classes_of(nodes)) or 'none'}"
                )
            self.ask({Ask(device_class=name): 1 for name in lacking or [PORTABLE]})
            time.sleep(1)
        return nodes

    def _start_check(self, node: Node, wanted: Collection[str]) -> None:
        """Check a node for those of the wanted classes that it serves."""
        self._checks.start(
            replace(node, classes=tuple(name for name in node.classes if name in wanted))
        )

    def _check_store(self, checks: Collection[NodeCheck]) -> None:
        problems = {
            check.node.node_id: check.sight.problem
            for check in checks
            if check.sight.problem is not None
        }
        if problems:
            first, why = next(iter(problems.items()))
            raise InfrastructureError(
                f"{len(problems)} node(s) cannot use the store, the first is {first}: {why}; put it"
                " on storage that all nodes mount at the same path, or in a bucket that they can"
                " reach",
                code="CP-STORE-UNSHARED",
            )

    def _take_answers(self) -> None:
        """Use doubtful nodes that answer; drop those that have left, and those whose answer was
        lost, to be checked again.
        """
        asked = {handle: node_id for node_id, handle in self._doubted.items()}
        for done in self.cluster.wait([*asked], timeout_s=0) if asked else ():
            node_id = asked[done.handle]
            self._doubted.pop(node_id, None)
            if done.failure is None:
                continue
            self._refresh()
            if node_id in self._used:
                lost = self._used.pop(node_id)
                self._note(
                    f"node {node_id[:12]} does not answer ({done.failure}); it served"
                    f" {', '.join(lost.classes)}"
                )

    def _refresh(self) -> None:
        alive = {node.node_id: node for node in self.cluster.nodes()}
        for node_id in [name for name in self._used if name not in alive]:
            self._note(
                f"node {node_id[:12]} left; it served {', '.join(self._used[node_id].classes)}"
            )
            del self._used[node_id]
            self._doubted.pop(node_id, None)
        for node_id in self._checks.under_way.keys() - alive.keys():
            del self._checks.under_way[node_id]
        for node_id, node in alive.items():
            again, _ = self._refused.get(node_id, (0, ""))
            if (
                node_id not in self._used
                and node_id not in self._checks.under_way
                and time.monotonic() >= again
            ):
                self._start_check(node, self._facts)

    def _num_threads(self, name: str) -> int:
        counts = [node.num_cpus for node in self._used.values() if name in node.classes]
        before = self._before.get(name)
        if before is not None and before.num_threads <= max(counts):
            return before.num_threads
        if before is not None:
            self._note(
                f"{name} now uses {min(counts)} threads, since no node has the {before.num_threads}"
                " CPUs that the campaign started with; work finished for those is repeated"
            )
        return min(counts)

    def _toolchain(self, name: str, said: Collection[ClassFacts]) -> Mapping[str, Any]:
        """Return the toolchain of a class: that of the continued campaign if a node has it, else
        the most common one.

        Of several, it is the one with the older torch: newer ones open what that makes.
        """
        counted = Counter(_text(facts.toolchain) for facts in said)
        found = {_text(facts.toolchain): facts.toolchain for facts in said}
        usual = min(
            counted, key=lambda text: (-counted[text], version_tuple(found[text]["torch"]), text)
        )
        if name in self._before and _text(self._before[name].toolchain) in found:
            usual = _text(self._before[name].toolchain)
        elif name in self._before:
            self._note(
                f"{name} is now built with {usual}, since no node has the toolchain that the"
                f" campaign started with, {_text(self._before[name].toolchain)}; work finished with"
                " that is repeated"
            )
        return found[usual]

    def _settle(self, checks: Collection[NodeCheck]) -> None:
        """Choose the toolchain and memory of each class."""
        for name in classes_of([check.node for check in checks]):
            if said := [facts for check in checks if (facts := check.facts(name)) is not None]:
                memory_bytes = max(facts.memory_bytes or 0 for facts in said) or None
                self._facts[name] = ClassFacts(
                    num_threads=0, toolchain=self._toolchain(name, said), memory_bytes=memory_bytes
                )

    def _admit(self, check: NodeCheck) -> None:
        """Use a checked node for the classes that it fits, or report why not."""
        node = check.node
        if check.failure is not None:
            self._refuse(
                node,
                f"{check.failure}; checked again every {AGAIN_S:g} s",
                time.monotonic() + AGAIN_S,
            )
            return
        node = replace(
            node, classes=tuple(name for name in node.classes if self._fits(check, name))
        )
        if not node.classes:
            self._refuse(node, "its toolchain differs from the other nodes", math.inf)
            return
        self.blind = self.blind or not check.sight.sees_files
        self._used[node.node_id] = node
        if self._next:
            self._note(f"node {node.node_id[:12]} joined, for {', '.join(node.classes)}")

    def _refuse(self, node: Node, why: str, until: float) -> None:
        """Do not use or check a node until a time; report why, once."""
        if self._refused.get(node.node_id, (0, ""))[1] != why:
            self._note(f"node {node.node_id[:12]} is not used: {why}")
        self._refused[node.node_id] = until, why

    def _fits(self, check: NodeCheck, name: str) -> bool:
        """Whether a node has the toolchain of a class; reports it if not."""
        probed, why = check.probed(name), ""
        if probed is None:
            why = "Ray has no GPU there; start it with --num-gpus"
        elif probed.failure is not None:
            why = probed.failure
        elif self._facts[name].toolchain != probed.value.toolchain:
            why = (
                "its toolchain differs:"
                f" {_differences(probed.value.toolchain, self._facts[name].toolchain)}"
            )
        if why:
            self._note(f"node {check.node.node_id[:12]} is not used for {name}: {why}")
        return not why

    def _note(self, text: str) -> None:
        self._show(Event(kind="note", text=text))


def _answer() -> None:
    """On a node: show that it runs tasks."""


def _text(toolchain: Mapping[str, Any]) -> str:
    """A toolchain in one line, independent of the order of its parts."""
    return json.dumps(toolchain, sort_keys=True)


def _differences(found: Mapping[str, Any], used: Mapping[str, Any]) -> str:
    """The parts of a node's toolchain that differ from the one that a class uses."""
    names = [name for name in {**used, **found} if found.get(name) != used.get(name)]
    return ", ".join(f"{name} {found.get(name)} instead of {used.get(name)}" for name in names)


def _problem(nodes: Collection[Node]) -> InfrastructureError | None:
    """Return why nothing can run on these nodes."""
    if not nodes:
        return InfrastructureError(
            "the cluster has no node with a CPU; start workers with `ray start`", code="CP-RAY"
        )
    if not any(node.labelled for node in nodes):
        level = next((name for name in detect().classes if name != PORTABLE), "cpu-x86-64-v3")
        return InfrastructureError(
            f"no node of the cluster carries a label {LABEL}<device class>; start workers with `ray"
            f" start --labels={LABEL}{level}=true`, or with the options that `python -m"
            " jobs.worker_labels` prints",
            code="CP-NO-NODE",
        )
    return None
